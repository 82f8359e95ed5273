"""The command `evenpack finetune`."""

from pathlib import Path
from typing import Annotated

import typer

from evenpack.launcher.cli.arguments import AsJson, Overrides, reporting

FinetuneFile = Annotated[
    Path,
    typer.Argument(
        metavar="FINETUNE.yaml", help="The run file of a fine-tuning, or the name of a shipped one.", show_default=False
    ),
]


def finetune(run_file: FinetuneFile, overrides: Overrides = None, *, as_json: AsJson = False) -> None:
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
    with reporting(as_json) as report:
        from evenpack.launcher.processes.devices import settle_accelerator

        settle_accelerator()

        from evenpack import console, progress
        from evenpack.finetuning.run import finetune as run_finetuning
        from evenpack.finetuning.views import result_tables
        from evenpack.launcher.processes.output_lock import held_output_dir

        with progress.Progress(console.messages()) as shown:
            summary = run_finetuning(config, shown, hold=held_output_dir)
        report.value = summary
        report.shown += [*result_tables(summary), console.text(f"Wrote {config.run.output_dir}/results.json")]
