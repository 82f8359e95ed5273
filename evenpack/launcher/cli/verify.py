"""`evenpack verify`."""

import typer

from evenpack.launcher.cli.arguments import AsJson, Overrides, RunFile, load, reporting


def verify(run_file: RunFile, overrides: Overrides = None, *, as_json: AsJson = False) -> None:
    """Compare every file of the prepared data with its checksum.

    Names each damaged file and where its damage begins. Exit code 0 where all are as they were written, 1 where one is
    not, 2 where the data is not prepared.

    \b
    Example:
      evenpack verify configs/gpt2_mini_wiki.yaml
    """
    config = load(run_file, overrides)
    exit_code = 0
    with reporting(as_json) as report:
        from evenpack.launcher.verified import verify_prepared

        report.value, report.shown, exit_code = verify_prepared(config)
    raise typer.Exit(exit_code)
