"""The common parts of commands: their arguments and options, reading run files, and one way to report."""

import dataclasses
import errno
import functools
import inspect
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from evenpack.console import Report
from evenpack.errors import EXIT_BAD_INPUT, ConfigError
from evenpack.files import expand_users, explained, require_file

if TYPE_CHECKING:
    from evenpack.engine.config import RunConfig


SETTINGS = {"help_option_names": ["-h", "--help"]}
"""Settings of every group of commands."""

RunFile = Annotated[
    Path,
    typer.Argument(
        metavar="RUN.yaml", help="The run file, or the name of one that comes with evenpack (evenpack config list)."
    ),
]
RunOrFile = Annotated[
    Path, typer.Argument(metavar="RUN", help="Output directory of a run, or its run file.", show_default=False)
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="section.key=value", help="Replace values of the run file.")
]
StudyFile = Annotated[Path, typer.Argument(metavar="STUDY.yaml", help="The study file, or the name of a shipped one.")]
StudyOverrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="section.key=value", help="Replace values of the study file, or of all its runs."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document; all other output goes to stderr.")]


def parse_step(text: str) -> int:
    """Returns the step that an option names. Raises: BadParameter for anything else."""
    if text.isdecimal() and int(text) >= 1:
        return int(text)
    raise typer.BadParameter(f"expected a step, from 1, found {text!r}")


AtStep = Annotated[
    Any,
    typer.Option(
        "--checkpoint",
        metavar="STEP",
        parser=parse_step,
        help="The checkpoint of this step. Default: the newest.",
    ),
]
_INPUT_HELP = (
    "A run (.yaml); a published name (wikipedia_512); a .json histogram; lengths in .npy, in text, or - for stdin; "
    "columns in .parquet, .csv, .tsv, .jsonl; a dataset: a folder, NAME[:SUBSET] of the hub; or a task, glue:cola."
)
LengthsInput = Annotated[str, typer.Argument(metavar="INPUT", help=_INPUT_HELP)]
Save = Annotated[Path | None, typer.Option("--save", metavar="FILE.json", help="Also write the JSON document.")]


def reporting(command: Callable[..., Report], *, saves: bool) -> Callable[..., None]:
    """Returns a command as the command line has it: with --json and, where it `saves`, --save.

    Standard output is kept for what it reports, which is printed at its end. Its arguments have their `~` expanded: a
    shell leaves that of `--option=~/file` alone.
    """

    @functools.wraps(command)
    def run(*, save: Path | None = None, as_json: bool = False, **given: Any) -> None:
        from evenpack import console

        save = expand_users(save)
        if save is not None:
            require_file(save, ".json", option="--save")
        console.log_to_stderr()
        with redirect_stdout(sys.stderr):
            report = command(**{name: expand_users(value) for name, value in given.items()})
        if report.is_silent:
            return
        if save is not None:
            with explained(save, ConfigError, action="written", then="name another --save"):
                console.save_json(report.value, save)
            report.shown.append(console.text(f"Wrote {save}"))
        with onto_stdout():
            if as_json:
                console.print_json(report.value)
            else:
                report.show()
        if report.unmet is not None:
            console.print_error(report.unmet)
        if report.unmet is not None or report.exit_code:
            sys.exit(report.exit_code or EXIT_BAD_INPUT)

    signature = inspect.signature(command)
    added = [("save", Save, None)] * saves + [("as_json", AsJson, False)]
    keyword = inspect.Parameter.KEYWORD_ONLY
    options = [inspect.Parameter(name, keyword, default=default, annotation=kind) for name, kind, default in added]
    run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *options])  # type: ignore[attr-defined]
    return run


@contextmanager
def onto_stdout() -> Iterator[None]:
    """Prints within the block; where that cannot be written, the process ends with a message and `EXIT_BAD_INPUT`.

    Where the reader has gone it ends as by the signal for it, which is usual.
    """
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what is left, which Python writes at its end
        if error.errno == errno.EPIPE:
            sys.exit(128 + signal.SIGPIPE)
        fail(f"standard output cannot be written: {error.strerror}")


def load(run_file: Path, overrides: Sequence[str] | None) -> "RunConfig":
    """Loads the run of a file and overrides, with its notes on standard error. Raises: ConfigError."""
    from evenpack import console
    from evenpack.config import load_run_file
    from evenpack.engine.config import RunConfig

    console.log_to_stderr()
    return load_run_file(run_file, RunConfig, overrides or [])


def output_dir_of(run: Path, overrides: Sequence[str] = ()) -> Path:
    """Returns the output directory that a run file names, or the path as it is. Raises: ConfigError."""
    from evenpack.shipped import names_run_file

    return load(run, overrides).run.output_dir if names_run_file(run) else run


def fail(message: str) -> NoReturn:
    """Shows the message and ends with `EXIT_BAD_INPUT`."""
    from evenpack import console

    with suppress(OSError):  # where nobody reads it, the exit code still says it
        console.print_error(message)
    if "--json" in sys.argv:  # in every command, because it has not reached its own document
        with suppress(OSError):
            print(json.dumps({"state": "failed", "message": message}))
    sys.exit(EXIT_BAD_INPUT)


def takes(name: str, options_class: type[Any]) -> Callable[[Callable[..., Report]], Callable[..., Report]]:
    """Gives a command with a parameter `name`, a dataclass, one option of the command line for each field."""
    fields = dataclasses.fields(options_class)

    def decorate(command: Callable[..., Report]) -> Callable[..., Report]:
        @functools.wraps(command)
        def run(**given: Any) -> Report:
            options = options_class(**{field.name: given.pop(field.name) for field in fields})
            return command(**{name: options}, **given)

        signature = inspect.signature(command)
        parameters = []
        for parameter in signature.parameters.values():
            if parameter.name == name:
                keyword = inspect.Parameter.KEYWORD_ONLY
                parameters += [
                    inspect.Parameter(field.name, keyword, default=field.default, annotation=field.type)
                    for field in fields
                ]
            else:
                parameters.append(parameter)
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return run

    return decorate
