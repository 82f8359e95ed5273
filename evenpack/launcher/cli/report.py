"""`evenpack report`."""

from pathlib import Path
from typing import Annotated

import typer

from evenpack.errors import ConfigError
from evenpack.launcher.cli.arguments import AsJson, Save, load, reporting

Runs = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN... [section.key=value ...]",
        help="Output directories of runs, or run files, with values to replace in these.",
        show_default=False,
    ),
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
      evenpack report RUN.yaml run.output_dir=runs/again
      evenpack report runs/packed runs/padded --output comparison
    """
    overrides = [word for word in runs if "=" in word and not Path(word).exists()]
    output_dirs = [_output_dir(Path(word), overrides) for word in runs if word not in overrides]
    if overrides and not any(_is_run_file(Path(word)) for word in runs):
        raise ConfigError(f"{overrides[0]} replaces a value of a run file, and none is given: give RUN.yaml")
    with reporting(as_json, save=save) as shown:
        from evenpack.launcher.processes.output_lock import is_held
        from evenpack.studies.report.report import make_report

        shown.take(make_report(output_dirs, output, is_held=is_held))


def _is_run_file(run: Path) -> bool:
    return run.suffix in (".yaml", ".yml")


def _output_dir(run: Path, overrides: list[str]) -> Path:
    """Returns the output directory that a run file names, or the path as it is. Raises: ConfigError."""
    return load(run, overrides).run.output_dir if _is_run_file(run) else run
