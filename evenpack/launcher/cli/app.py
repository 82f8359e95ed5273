"""The command line: `evenpack COMMAND RUN.yaml [section.key=value ...]`.

Commands are in files by subject. Each reads its arguments, calls the code that does the work, and shows the result; it
imports heavy modules itself.
"""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from evenpack.data.opened_directories import recorded_directories
from evenpack.errors import EvenpackError
from evenpack.launcher.cli.arguments import SETTINGS, fail
from evenpack.launcher.cli.data import inspect, prepare, shards_app, verify, where
from evenpack.launcher.cli.results import evaluate, export, finetune, mlperf_app, report, waits
from evenpack.launcher.cli.run_files import config_app, new
from evenpack.launcher.cli.studies import STUDIES, budget, probe
from evenpack.launcher.cli.training import doctor, slurm, stop, train
from evenpack.launcher.processes.stop import end_with_starter
from evenpack.version import VERSION

COMMANDS: tuple[Callable[..., None], ...] = (
    new,
    prepare,
    verify,
    budget,
    train,
    stop,
    slurm,
    evaluate,
    report,
    waits,
    inspect,
    where,
    export,
    finetune,
    probe,
    doctor,
)
"""The commands in the order in which `--help` lists them; each has the name of its function."""

_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS)

app = typer.Typer(
    help="Distributed pretraining on DeepSpeed: equal packs for every GPU, nearly no padding, no attention "
    "between sequences.\n\n\b\nA first run:\n  evenpack prepare demo\n  evenpack train demo",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    add_completion=False,
    context_settings=SETTINGS,
)
study_app = typer.Typer(help="Measure, simulate and compare.", no_args_is_help=True, context_settings=SETTINGS)
for command in COMMANDS:
    app.command()(command)
for name, study in STUDIES.items():
    study_app.command(name)(study)


def _show_version(is_asked: bool | None) -> None:
    if is_asked:
        typer.echo(f"evenpack {VERSION}")
        raise typer.Exit


@app.callback()
def options(
    *,
    version: Annotated[
        bool | None, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = None,
) -> None:
    """The options of evenpack itself; its commands have their own."""


app.add_typer(config_app, name="config")
app.add_typer(shards_app, name="shards")
app.add_typer(study_app, name="study")
app.add_typer(mlperf_app, name="mlperf")


def main() -> None:
    """Runs the command line. An error that the user can correct becomes a message and exit code 2.

    An unexplained one makes it verify the prepared data that the command has opened: damage is named instead.
    """
    end_with_starter()
    with recorded_directories() as opened:
        try:
            app()
        except EvenpackError as error:
            fail(str(error))
        except Exception as error:
            if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
                from evenpack.yaml_text import quoted

                fail(
                    f"{quoted(error.filename)}: {error.strerror}; a name in a path has at most 255 bytes: give another"
                )
            if isinstance(error, OSError) and error.errno in _CANNOT_WRITE:
                fail(_cannot_write(error))
            _fail_if_damaged(opened, error)
            raise


def _cannot_write(error: OSError) -> str:
    place = error.filename or "a file"
    if error.errno == errno.EACCES:
        return f"{place} cannot be read or written: {error.strerror}; change its permissions, or choose another"
    return f"{place} cannot be written: {error.strerror}; free space or choose another folder"


def _fail_if_damaged(directories: list[Path], error: Exception) -> None:
    for directory in directories:
        from evenpack.data.prepare.verification import damage_behind

        damage = damage_behind(error, directory)
        if damage is not None:
            fail(str(damage))
