"""`evenpack report`."""

from pathlib import Path
from typing import Annotated

import typer

from evenpack.launcher.cli.arguments import AsJson, Save, load, reporting

Runs = Annotated[
    list[Path],
    typer.Argument(metavar="RUN...", help="Output directories of runs, or run files.", show_default=False),
]


def report(
    runs: Runs,
    *,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Where the page and figures go.")
    ] = Path("report"),
    save: Save = None,
    as_json: AsJson = False,
) -> None:
    """Draw one or more training runs side by side: losses, throughput, padding, waits.

    Writes report.html, which needs nothing beside it, and each figure as PNG. Runs may still be on. Runs of other data
    are drawn against tokens and time, and the page says so.

    \b
    Examples:
      evenpack report runs/demo
      evenpack report runs/packed runs/padded --output comparison
    """
    output_dirs = [_output_dir(run) for run in runs]
    with reporting(as_json, save=save) as shown:
        from evenpack.launcher.processes.output_lock import is_held
        from evenpack.studies.report.report import make_report

        shown.take(make_report(output_dirs, output, is_held=is_held))


def _output_dir(run: Path) -> Path:
    """Returns the output directory that a run file names, or the path as it is. Raises: ConfigError."""
    return load(run, None).run.output_dir if run.suffix in (".yaml", ".yml") else run
