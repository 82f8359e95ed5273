"""`evenpack new`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from evenpack.errors import ConfigError
from evenpack.launcher.cli.arguments import AsJson, reporting


def new(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.yaml", help="The run file to write.", show_default=False)],
    *,
    data: Annotated[Path | None, typer.Option(help="A file or folder of text.", show_default=False)] = None,
    text_key: Annotated[
        str | None, typer.Option(help="The key or column of the text. Default: 'text'.", show_default=False)
    ] = None,
    model: Annotated[str | None, typer.Option(help="gpt2_mini, bert_large, ...", show_default=False)] = None,
    devices: Annotated[
        int | None, typer.Option(min=0, help="GPUs of all machines together; 0: CPU cores.", show_default=False)
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="A folder with the model's vocabulary. Default: one is trained on the data."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a commented run file for your own text.

    Asks for what is not given.

    \b
    Example:
      evenpack new my_run.yaml --data texts/ --model gpt2_mini --devices 0
    """
    with reporting(as_json) as report:
        from evenpack import console
        from evenpack.config import nearest
        from evenpack.launcher.new_run.run_file import MODELS, NewRun, write_run_file
        from evenpack.launcher.new_run.sources import source_section

        if run_file.suffix != ".yaml":
            raise ConfigError(f"a run file ends in .yaml: give a name like {run_file.with_suffix('.yaml')}")
        path = Path(_asked(None if data is None else str(data), "--data", "A file or folder of text"))
        chosen = _asked(model, "--model", f"The model, one of {', '.join(MODELS)}", default="gpt2_mini")
        if chosen not in MODELS:
            raise ConfigError(f"--model {chosen} is none of {', '.join(MODELS)}{nearest(chosen, tuple(MODELS))}")
        count = _asked(
            None if devices is None else str(devices), "--devices", "How many GPUs; 0: CPU cores", default="0"
        )
        if not count.isdecimal():
            raise ConfigError(f"--devices {count} is not a number of GPUs: give 0 for CPU cores, 8 for a node of 8")
        run = NewRun(
            name=run_file.stem,
            source=source_section(path, text_key=text_key),
            model=chosen,
            tokenizer=tokenizer,
            devices=int(count),
        )
        write_run_file(run_file, run)
        report.value = {"run_file": run_file}
        steps = "\n".join(f"  evenpack {command} {run_file}" for command in ("prepare", "budget", "train", "evaluate"))
        report.shown.append(console.text(f"Wrote {run_file}. Next:\n{steps}"))


def _asked(given: str | None, option: str, question: str, *, default: str | None = None) -> str:
    """Returns the given value, or the answer to a question. Raises: ConfigError without a terminal."""
    if given is not None:
        return given
    if not sys.stdin.isatty():
        raise ConfigError(f"{option} is missing, and there is no terminal to ask at: {question}")
    return str(typer.prompt(question, default=default, err=True))
