"""Commands on what a run has left: `evenpack evaluate`, `report`, `waits`, `export` and `finetune`."""

import os
from pathlib import Path
from typing import Annotated

import typer

from evenpack import console
from evenpack.console import Report
from evenpack.errors import ConfigError
from evenpack.launcher.cli.arguments import AtStep, Overrides, RunFile, RunOrFile, load, output_dir_of
from evenpack.shipped import names_run_file


def evaluate(
    run_file: RunFile,
    overrides: Overrides = None,
    *,
    checkpoint: AtStep = None,
    data: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Evaluate on all text of a file, folder or pattern.")
    ] = None,
) -> Report:
    """Evaluate on each source's held-out documents.

    Uses the newest checkpoint of the run, or the one of --checkpoint STEP, in one process, on the GPU if there is one.
    The data may be prepared with another recipe than in training, by the same tokenizer: the same documents are held
    out.

    \b
    Examples:
      evenpack evaluate gpt2_mini_wiki training.evaluation_packs=500
      evenpack evaluate RUN.yaml --checkpoint 400 --data other.jsonl.zst
      evenpack evaluate RUN.yaml data.prepared_dir=runs/other data.recipe='{kind: documents, ...}' --save other.json
    """
    config = load(run_file, overrides)
    from evenpack.engine.checkpoints.continuation import require_checkpoint

    require_checkpoint(config)  # before torch is imported
    from evenpack.launcher.trained import describe_evaluation, evaluate_run

    return describe_evaluation(evaluate_run(config, step=checkpoint, data=data))


Runs = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN... [section.key=value ...]",
        help="Output directories of runs, or run files, with values to replace in these.",
    ),
]


def report(
    runs: Runs,
    *,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Where the figure goes.")] = Path(
        "report"
    ),
) -> Report:
    """Draw one or more training runs side by side: losses and throughput, with the settings that differ.

    Draws report.png. Runs may still be on. Runs of other data are drawn against tokens and time, and a note says so.

    \b
    Examples:
      evenpack report runs/demo
      evenpack report RUN.yaml run.output_dir=runs/again
      evenpack report runs/packed runs/padded --output comparison
    """
    # An override may be too long for a path, about which `Path.exists` raises an error.
    overrides = [word for word in runs if "=" in word and not os.path.exists(word)]  # noqa: PTH110
    output_dirs = [output_dir_of(Path(word), overrides) for word in runs if word not in overrides]
    if overrides and not any(names_run_file(word) for word in runs):
        raise ConfigError(f"{overrides[0]} replaces a value of a run file, and none is given: give RUN.yaml")
    from evenpack.studies.waits import require_log

    for output_dir in output_dirs:  # before torch is imported
        require_log(output_dir)
    from evenpack.studies.report import make_report

    return make_report(output_dirs, output)


def waits(
    run: RunOrFile,
    overrides: Overrides = None,
) -> Report:
    """Show why the ranks of a run waited, in device hours, and which of them were slow.

    A wait is split into plan (the last rank was given more work), machine (it is slower than its work says), noise and
    loader. A rank that has become slow is named by host and device, with the step at which it began and recovered. The
    run may still be on. docs/runs_compared.md says how, and how soon.

    \b
    Examples:
      evenpack waits runs/demo
      evenpack waits RUN.yaml --save waits.json
    """
    if overrides and not names_run_file(run):
        raise ConfigError(f"{overrides[0]} replaces a value of a run file, and none is given: give RUN.yaml")
    from evenpack.studies.waits import explain_waits

    return explain_waits(output_dir_of(run, overrides or []))


def export(
    run_file: RunFile,
    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="Folder to create.")],
    overrides: Overrides = None,
    *,
    checkpoint: AtStep = None,
) -> Report:
    """Write a checkpoint for Hugging Face transformers.

    Uses the newest checkpoint of the run, or the one of --checkpoint STEP. The class of the run's model in transformers
    loads it (`GPT2LMHeadModel`, `LlamaForCausalLM`, `BertForPreTraining`) by `.from_pretrained(DIRECTORY)`.

    \b
    Example:
      evenpack export gpt2_small gpt2_small_export
    """
    config = load(run_file, overrides)
    from evenpack.engine.checkpoints.continuation import require_checkpoint

    require_checkpoint(config)
    from evenpack.launcher.trained import export_run

    done = export_run(config, directory, step=checkpoint)
    note = "with its tokenizer" if done.tokenizer else "without a tokenizer: its source holds tokens"
    return Report(value=done, shown=[console.text(f"Wrote {directory}, {note}, after step {done.step:,}")])


FinetuneFile = Annotated[
    Path, typer.Argument(metavar="FINETUNE.yaml", help="The run file of a fine-tuning, or the name of a shipped one.")
]


def finetune(run_file: FinetuneFile, overrides: Overrides = None) -> Report:
    """Fine-tune a pretrained encoder on a task, packed or not.

    Trains each seed and evaluates it on the task's development files. A seed with a result in the output directory is
    not trained again, so an interrupted command can be run again to continue.

    \b
    Example:
      evenpack finetune finetune/cola data.folder=glue/CoLA training.initialize_from=runs/bert_mini_wiki
    """
    from evenpack.config import load_run_file
    from evenpack.finetuning.config import FinetuneConfig

    config = load_run_file(run_file, FinetuneConfig, overrides or [])
    from evenpack.launcher.processes.devices import choose_accelerator

    choose_accelerator()

    from evenpack import progress
    from evenpack.finetuning.results import result_tables
    from evenpack.finetuning.run import finetune as run_finetuning
    from evenpack.launcher.processes.holding import held_output_dir

    with progress.Progress(console.messages()) as shown:
        summary = run_finetuning(config, shown, hold=held_output_dir)
    wrote = console.text(f"Wrote {config.run.output_dir}/results.json")
    return Report(value=summary, shown=[*result_tables(summary), wrote])
