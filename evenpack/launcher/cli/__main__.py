"""Entry point of the command `evenpack`; by `python -m evenpack.launcher.cli` the ranks of a study are started."""

import sys

from evenpack.errors import EXIT_BAD_INPUT


def main() -> None:
    """Runs the command line; an installation that lacks a package says which extra brings it."""
    try:
        from evenpack.launcher.cli.app import main as run

        run()
    except ModuleNotFoundError as error:
        from evenpack.extras import explained

        lacking = explained(error, "the command line")
        if lacking is None:
            raise
        print(lacking, file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)


if __name__ == "__main__":
    main()
