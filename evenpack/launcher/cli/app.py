"""The command line: `evenpack COMMAND RUN.yaml [section.key=value ...]`.

Each command reads its arguments, calls what does the work, and shows the result. Whatever is heavy is imported by
the command that needs it.
"""

import errno
from pathlib import Path
from typing import Annotated

import typer

from evenpack.errors import ConfigError, EvenpackError
from evenpack.launcher.cli.arguments import (
    SETTINGS,
    AsJson,
    LengthsInput,
    Overrides,
    Plot,
    RunFile,
    fail,
    load,
    reporting,
)
from evenpack.launcher.cli.study import study_app
from evenpack.launcher.cli.subject_options import takes_subject
from evenpack.studies.lengths.options import SubjectOptions

EXIT_PROBE_FAILED = 1
"""Of `evenpack doctor`."""

app = typer.Typer(
    help="Distributed pretraining on DeepSpeed: equal packs for every GPU, nearly no padding, no document sees "
    "another.\n\n\b\nA first run:\n  evenpack prepare configs/demo.yaml\n  evenpack train configs/demo.yaml",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    add_completion=False,
    context_settings=SETTINGS,
)
config_app = typer.Typer(help="Look at run files.", no_args_is_help=True, context_settings=SETTINGS)
app.add_typer(config_app, name="config")
app.add_typer(study_app, name="study")


def main() -> None:
    """Entry point. An error that the user can mend becomes a message and exit code 2."""
    try:
        app()
    except EvenpackError as error:
        fail(str(error))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
            raise
        fail(f"{error.filename or 'a file'} cannot be written: {error.strerror}; make room or choose another folder")


@app.command()
def prepare(run_file: RunFile, overrides: Overrides = None, *, as_json: AsJson = False) -> None:
    """Turn text into tokens and packs.

    Writes to data.prepared_dir. A second call does nothing; an interrupted one goes on.

    \b
    Example:
      evenpack prepare configs/gpt2_mini_wiki.yaml data.sources.wiki.path=wiki.jsonl.zst
    """
    config = load(run_file, overrides)
    with reporting(as_json) as report:
        from evenpack import console
        from evenpack.data.prepare.prepare import prepare as prepare_data
        from evenpack.data.prepare.shown import PrepareProgress
        from evenpack.studies.inspection.tables import splits_table

        with PrepareProgress(console.messages()) as progress:
            try:
                manifest = prepare_data(config.data, config.prepared_dir, progress=progress)
            except KeyboardInterrupt:
                progress.note("interrupted; the same command goes on from here")
                raise
        splits = manifest.summary()
        report.value = {
            "directory": config.prepared_dir,
            "vocabulary_size": manifest.tokenizer.vocabulary_size,
            "splits": splits,
        }
        report.shown.append(splits_table(splits, title=f"Prepared in {config.prepared_dir}"))


@app.command()
def train(
    run_file: RunFile,
    overrides: Overrides = None,
    *,
    num_gpus: Annotated[
        int | None,
        typer.Option("--num-gpus", "-n", help="Ranks on this machine (of each one in a hostfile). Default: all GPUs."),
    ] = None,
    hostfile: Annotated[
        Path | None, typer.Option(help="Machines to run on, in lines 'NAME slots=N'.", show_default=False)
    ] = None,
    deepspeed_options: Annotated[
        str, typer.Option(help="Further options of `deepspeed`, in one string.", show_default=False)
    ] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be started, and stop.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train a prepared run under `deepspeed`.

    Goes on from the newest checkpoint in run.output_dir. Ctrl-C or SIGTERM saves at the end of the step and ends
    with exit code 75; the same command goes on from there. A second Ctrl-C ends at once.

    \b
    Example:
      evenpack train configs/gpt2_small.yaml --num-gpus 8 training.steps=5000
    """
    from evenpack.launcher.processes.launch import plan_launch
    from evenpack.launcher.processes.streams import outlive_terminal

    outlive_terminal()
    config = load(run_file, overrides)
    exit_code = 0
    with reporting(as_json) as report:
        from evenpack.launcher.cli.train import describe_run, run_training
        from evenpack.launcher.training import plan_training

        launch = plan_launch(
            run_file, overrides or [], num_gpus=num_gpus, hostfile=hostfile, deepspeed_options=deepspeed_options
        )
        plan = plan_training(config, ranks=launch.devices.ranks)
        if dry_run:
            report.value, report.shown = describe_run(launch, plan)
        else:
            report.value, report.shown, exit_code = run_training(config, launch, plan)
    raise typer.Exit(exit_code)


@app.command()
def evaluate(run_file: RunFile, overrides: Overrides = None, *, as_json: AsJson = False) -> None:
    """Evaluate on each source's held-out documents.

    Takes the newest checkpoint of the run, in one process, on the GPU if there is one.

    \b
    Example:
      evenpack evaluate configs/gpt2_mini_wiki.yaml training.evaluation_packs=500
    """
    config = load(run_file, overrides)
    with reporting(as_json) as report:
        from evenpack.launcher.processes.devices import settle_accelerator

        settle_accelerator()
        import torch

        from evenpack.engine.evaluate import evaluate_model, evaluations_to_json
        from evenpack.launcher import views
        from evenpack.launcher.trained import load_trained_model

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        trained = load_trained_model(config, device)
        evaluations = evaluate_model(trained.model, trained.prepared, config, trained.world)
        sources = evaluations_to_json(trained.prepared, evaluations)
        report.value = {"checkpoint": trained.checkpoint.path, "step": trained.checkpoint.step, "sources": sources}
        report.shown.append(views.evaluation_table(sources, title=f"After step {trained.checkpoint.step:,}"))


@app.command()
@takes_subject
def inspect(
    lengths: LengthsInput,
    overrides: Overrides = None,
    *,
    options: SubjectOptions,
    pack_lengths: Annotated[
        str | None,
        typer.Option(help="Compare these lengths of packs: 512,640. Default: up to twice as long.", show_default=False),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="How far from these lengths? wikipedia_512.", show_default=False),
    ] = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Show lengths, the cost of padding, and packing.

    Of a prepared run, or of any list of lengths. Several inputs are compared by depth.

    \b
    Examples:
      evenpack inspect configs/demo.yaml --plot lengths.png
      evenpack inspect configs/bert_large_phase2.yaml --against wikipedia_512
      evenpack inspect tokenized.parquet --column input_ids --json
      evenpack inspect glue:cola --tokenizer bert-base-uncased --pack-length 128 --long truncate
      evenpack inspect wikipedia_128 wikipedia_512 wikipedia_2048 --plot depths.png
    """
    with reporting(as_json) as report:
        from evenpack.studies.inspection.against import distance_to, refuse_senseless
        from evenpack.studies.inspection.inspect import inspect_lengths, inspect_side_by_side
        from evenpack.studies.inspection.tables import distance_table
        from evenpack.studies.lengths.subject import find_subject

        more = [word for word in overrides or [] if "=" not in word]
        changes = [word for word in overrides or [] if "=" in word]
        if against is not None:
            refuse_senseless(against, (lengths, *more))
        subjects = [find_subject(one, changes, options) for one in (lengths, *more)]
        if more:
            if pack_lengths is not None:
                raise ConfigError("--pack-lengths compares the packs of a single input; several have --pack-length")
            report.value, report.shown = inspect_side_by_side(subjects, plot=plot)
        else:
            distance = None if against is None else distance_to(subjects[0], against)
            report.value, report.shown = inspect_lengths(subjects[0], pack_lengths=pack_lengths, plot=plot)
            if distance is not None:
                report.value["against"] = distance
                report.shown.append(distance_table(distance))


@app.command()
def export(
    run_file: RunFile,
    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="Is created.", show_default=False)],
    overrides: Overrides = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint for Hugging Face transformers.

    Takes the newest checkpoint of the run; `GPT2LMHeadModel.from_pretrained(DIRECTORY)` loads it, or
    `BertForPreTraining` where the run's model is BERT.

    \b
    Example:
      evenpack export configs/gpt2_small.yaml gpt2_small_export
    """
    config = load(run_file, overrides)
    with reporting(as_json) as report:
        from evenpack.launcher.processes.devices import settle_accelerator

        settle_accelerator()
        import torch

        from evenpack import console
        from evenpack.launcher.trained import load_trained_model
        from evenpack.models.huggingface import to_huggingface

        trained = load_trained_model(config, torch.device("cpu"))
        tokenizer = trained.prepared.tokenizer_dir if trained.prepared.tokenizer_dir.is_dir() else None
        to_huggingface(trained.model, directory, tokenizer_dir=tokenizer, special_token_id=trained.special_token_id)
        report.value = {"directory": directory, "step": trained.checkpoint.step, "tokenizer": tokenizer is not None}
        note = "with its tokenizer" if tokenizer else "without a tokenizer: its tokens came ready made"
        report.shown.append(console.text(f"Wrote {directory}, {note}, after step {trained.checkpoint.step:,}"))


@app.command()
def doctor(*, as_json: AsJson = False) -> None:
    """Check this machine and its attention backends.

    Versions, devices, which backend can serve what, and a probe that each keeps sequences apart. Exit code 1 if a
    probe fails or there is no `deepspeed`.

    \b
    Example:
      evenpack doctor --json
    """
    with reporting(as_json) as report:
        from evenpack.launcher.doctor import examine, tables

        found = examine()
        report.value, report.shown = found, tables(found)
    raise typer.Exit(0 if found.ok else EXIT_PROBE_FAILED)


@config_app.command("show")
def show_config(run_file: RunFile, overrides: Overrides = None, *, as_json: AsJson = False) -> None:
    """Print the whole run, defaults included.

    \b
    Example:
      evenpack config show configs/demo.yaml training.steps=10
    """
    config = load(run_file, overrides)
    with reporting(as_json) as report:
        import yaml

        from evenpack import console

        report.value = config.model_dump(mode="json")
        report.shown.append(console.text(yaml.safe_dump(report.value, sort_keys=False, width=100).rstrip()))
