"""Commands on run files: `evenpack new` and `fork` write one, `evenpack config ...` explains them."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from evenpack import console
from evenpack.console import Report
from evenpack.errors import ConfigError
from evenpack.files import require_file
from evenpack.launch_environment import shell_words
from evenpack.launcher.cli.arguments import SETTINGS, Overrides, RunFile, RunOrFile, load, output_dir_of


def new(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.yaml", help="The run file to write.")],
    *,
    data: Annotated[
        list[str] | None, typer.Option(metavar="PATH", help="A file, a folder or a pattern of text; may be repeated.")
    ] = None,
    text_key: Annotated[str | None, typer.Option(help="The key or column of the text. Default: 'text'.")] = None,
    model: Annotated[str | None, typer.Option(help="gpt2_mini, bert_large, ...")] = None,
    devices: Annotated[int | None, typer.Option(min=0, help="GPUs of all machines together; 0: CPU cores.")] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="A folder with the model's vocabulary. Default: one is trained on the data."),
    ] = None,
) -> Report:
    """Write a commented run file for your own text.

    Asks for what is not given. Each --data becomes a source of the run; a folder with files of several kinds becomes a
    source for each kind. Plain text in few files is divided into paragraphs, and what is printed says so.

    \b
    Examples:
      evenpack new my_run.yaml --data texts/ --model gpt2_mini --devices 0
      evenpack new my_run.yaml --data books/ --data 'web/*.jsonl.zst' --model gpt2_small --devices 8
    """
    from evenpack.config import nearest
    from evenpack.launcher.new_run import MODELS, NewRun, require_tokenizer, write_run_file
    from evenpack.launcher.preparing import notes_of_plain_text, source_sections

    require_file(run_file, ".yaml", option="evenpack new")
    paths = data or shell_words("--data", _ask("--data", "Files, folders or patterns of text"))
    if model is None:
        model = _ask("--model", f"The model, one of {', '.join(MODELS)}", default="gpt2_mini")
    if model not in MODELS:
        raise ConfigError(f"--model {model}: there is no such model; {nearest(model, tuple(MODELS))}")
    if devices is None:
        count = _ask("--devices", "How many GPUs; 0: CPU cores", default="0")
        if not count.isdecimal():
            raise ConfigError(f"--devices {count} is not a number of GPUs: give 0 for CPU cores, 8 for a node of 8")
        devices = int(count)
    run = NewRun(
        name=run_file.stem,
        sources=source_sections(paths, text_key=text_key),
        model=model,
        tokenizer=tokenizer,
        devices=devices,
    )
    notes = [*notes_of_plain_text(run.sources), *require_tokenizer(run)]
    write_run_file(run_file, run)
    commands = run.next_commands(run_file)
    sources = [{"source": name, "kind": at["kind"], "path": at["path"]} for name, at in run.sources.items()]
    return Report(
        value={"run_file": run_file, "sources": run.sources, "next": commands},
        shown=[
            console.table(sources),
            *map(console.text, notes),
            console.text("\n  ".join([f"Wrote {run_file} for {run.place}. Next:", *commands])),
        ],
    )


def fork(
    run: RunOrFile,
    run_file: Annotated[Path, typer.Argument(metavar="NEW.yaml", help="The run file to write.")],
    overrides: Overrides = None,
    *,
    at: Annotated[int, typer.Option("--at", metavar="STEP", min=1, help="The step with whose checkpoint it begins.")],
) -> Report:
    """Write the run file of a run that begins with a step of another.

    It is that run's file at the step, with overrides, which may change what a resume may change: schedule and optimizer
    settings, length, ranks, the mixture of later steps. `train` then goes on from the step, with weights, optimizer and
    order. The checkpoint is hard-linked, so the new run needs the other one no more.

    \b
    Examples:
      evenpack fork runs/trunk --at 20000 decay.yaml schedule.decay_steps=2000 training.steps=22000
      evenpack fork TRUNK.yaml --at 20000 hot.yaml optimizer.learning_rate=1e-3
    """
    from evenpack.launcher.forking import fork_run, next_command

    output_dir = output_dir_of(run)
    require_file(run_file, ".yaml", option="evenpack fork")
    forked = fork_run(output_dir, at, run_file, overrides or [])
    line = f"Wrote {run_file}, and {forked.checkpoint}. Next:\n  {next_command(forked)}"
    return Report(value=forked, shown=[console.text(line)])


def _ask(option: str, question: str, *, default: str | None = None) -> str:
    """Asks for the value of an option that is missing. Raises: ConfigError without a terminal."""
    if not sys.stdin.isatty():
        raise ConfigError(f"{option} is missing, and there is no terminal to ask at: {question}")
    return str(typer.prompt(question, default=default, err=True))


config_app = typer.Typer(help="Look at run files and their keys.", no_args_is_help=True, context_settings=SETTINGS)

FileKind = Annotated[
    str, typer.Option("--file", metavar="KIND", help="run, finetune, or a study: equivalence, chunking, shuffle.")
]


@config_app.command("show")
def show_config(run_file: RunFile, overrides: Overrides = None) -> Report:
    """Print the whole run file, including defaults.

    \b
    Example:
      evenpack config show demo training.steps=10
    """
    import yaml

    value = load(run_file, overrides).model_dump(mode="json")
    return Report(value=value, shown=[console.text(yaml.safe_dump(value, sort_keys=False, width=100).rstrip())])


@config_app.command("list")
def list_configs() -> Report:
    """List the run files that come with evenpack.

    Every command that reads a run file takes their names in place of a path.

    \b
    Example:
      evenpack config list
    """
    from evenpack.shipped import first_comment, shipped_run_files

    found = [{"name": name, "about": first_comment(path), "path": path} for name, path in shipped_run_files().items()]
    return Report(value=found, shown=[console.table([{key: row[key] for key in ("name", "about")} for row in found])])


@config_app.command("explain")
def explain(
    key: Annotated[
        str | None, typer.Argument(metavar="[section.key]", help="A key or a section. Default: all keys.")
    ] = None,
    *,
    file: FileKind = "run",
) -> Report:
    """Say what the keys of a run file mean: type, unit, default.

    \b
    Examples:
      evenpack config explain
      evenpack config explain data.recipe
      evenpack config explain training.packs_per_step
      evenpack config explain equivalence.margin --file equivalence
    """
    from evenpack.launcher.key_reference import explained, keys_at, keys_of, outline, schema_of

    keys = keys_of(schema_of(file))
    return Report(value=keys_at(keys, key), shown=[outline(keys)] if key is None else explained(keys, key))


@config_app.command("schema")
def schema(*, file: FileKind = "run") -> Report:
    """Print the JSON schema of run files, by which editors complete and check keys.

    It is one JSON document, with --json and without.

    \b
    Example:
      evenpack config schema > run_file.schema.json
    """
    import json

    from evenpack.launcher.key_reference import json_schema

    value = json_schema(file)
    return Report(value=value, shown=[console.text(json.dumps(value, indent=2))])
