"""The command `evenpack doctor`."""

import typer

from evenpack.launcher.cli.arguments import AsJson, reporting

EXIT_PROBE_FAILED = 1
"""Exit code if a probe has failed, or there is no `deepspeed`."""


def doctor(*, as_json: AsJson = False) -> None:
    """Check this machine and its attention backends.

    Shows versions, devices, the requests that each backend can serve, and a probe that each isolates sequences. Exit
    code 1 if a probe fails or there is no `deepspeed`.

    \b
    Example:
      evenpack doctor --json
    """
    with reporting(as_json) as report:
        from evenpack.launcher.doctor import examine, tables

        found = examine()
        report.value, report.shown = found, tables(found)
    raise typer.Exit(0 if found.ok else EXIT_PROBE_FAILED)
