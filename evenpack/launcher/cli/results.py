"""Commands on what a run has left: `evenpack evaluate`, `report`, `waits`, `export`, `finetune` and `mlperf ...`."""

import os
from pathlib import Path
from typing import Annotated

import typer

from evenpack import console
from evenpack.console import Report
from evenpack.errors import ConfigError
from evenpack.launcher.cli.arguments import (
    SETTINGS,
    AtStep,
    Overrides,
    RunFile,
    RunOrFile,
    load,
    output_dir_of,
)
from evenpack.shipped import names_run_file
from evenpack.studies.columns import Column, table_of


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
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Where the page and the figure go.")
    ] = Path("report"),
) -> Report:
    """Draw one or more training runs side by side: losses and throughput, with the settings that differ.

    Writes report.html, which needs nothing beside it, and the figure as PNG. Runs may still be on. Runs of other data
    are drawn against tokens and time, and the page says so.

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
    from evenpack.launcher.processes.holding import is_held
    from evenpack.studies.waits import require_log

    for output_dir in output_dirs:  # before torch is imported
        require_log(output_dir)
    from evenpack.studies.report import make_report

    return make_report(output_dirs, output, is_held=is_held)


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


EXIT_REFUSED = 1
"""Exit code if a log violates the rules, or a set of logs has no score."""

_SCORED = (
    Column("log"),
    Column("division"),
    Column("status", missing="not ended"),
    Column("minutes", form=".3f"),
    Column("samples"),
    Column("accuracy", form=".4f"),
    Column("batch (samples)", "global_batch_size"),
)

mlperf_app = typer.Typer(help="Check MLPerf logs, score sets of ten.", no_args_is_help=True, context_settings=SETTINGS)


@mlperf_app.command("check")
def check_mlperf(
    log: Annotated[Path, typer.Argument(metavar="LOG", help="OUTPUT_DIR/mlperf.log.")],
) -> Report:
    """Check a log by MLPerf Training's rules, with the compliance checker of its package mlperf-logging.

    The division is the one that the log names: an open run need not reach the target. Exit code 0 if it passes, 1 if it
    is refused.

    \b
    Example:
      evenpack mlperf check runs/mlperf_bert_large_packed/mlperf.log
    """
    from evenpack.studies.mlperf import check_log

    found = check_log(log)
    division = found.result.division
    value = {"log": found.log, "ruleset": found.ruleset, "division": division, "passed": found.passed}
    verdict = "passes" if found.passed else "is refused"
    lines = [f"{log} {verdict}: rules {found.ruleset}, {division or 'unnamed'} division", found.messages]
    return Report(
        value={**value, "messages": found.messages},
        shown=[console.text(line) for line in lines if line],
        exit_code=0 if found.passed else EXIT_REFUSED,
    )


@mlperf_app.command("report")
def report_mlperf(
    logs: Annotated[list[Path], typer.Argument(metavar="LOG...", help="mlperf.log of each run.")],
) -> Report:
    """Score a set of runs: the mean time to train of ten, without the fastest and the slowest.

    A run that missed the target counts as the slowest. Exit code 1 if there is no score.

    \b
    Example:
      evenpack mlperf report runs/mlperf_bert_large_packed_seed*/mlperf.log
    """
    from evenpack.studies.mlperf import read_result, score

    results = [read_result(log) for log in logs]
    found = score(results)
    has_score = found.minutes is not None
    line = f"Score: {found.minutes:.3f} minutes" if has_score else f"No score: {found.reason}"
    return Report(
        value={"minutes": found.minutes, "reason": found.reason, "runs": results},
        shown=[table_of(results, _SCORED, title="Time to train"), console.text(line)],
        exit_code=0 if has_score else EXIT_REFUSED,
    )
