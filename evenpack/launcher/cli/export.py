"""The command `evenpack export`."""

from pathlib import Path
from typing import Annotated

import typer

from evenpack.launcher.cli.arguments import AsJson, AtStep, Overrides, RunFile, load, reporting


def export(
    run_file: RunFile,
    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="Folder to create.", show_default=False)],
    overrides: Overrides = None,
    *,
    checkpoint: AtStep = None,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint for Hugging Face transformers.

    Uses the newest checkpoint of the run, or that of --checkpoint STEP, or the one of the lowest validation loss
    (--checkpoint best). The class of the run's model in transformers loads it (`GPT2LMHeadModel`, `LlamaForCausalLM`,
    `BertForPreTraining`) by `.from_pretrained(DIRECTORY)`.

    \b
    Example:
      evenpack export gpt2_small gpt2_small_export
    """
    config = load(run_file, overrides)
    with reporting(as_json) as report:
        from evenpack import console
        from evenpack.launcher.exporting import export_run

        report.value = done = export_run(config, directory, step=checkpoint)
        note = "with its tokenizer" if done.tokenizer else "without a tokenizer: its source holds tokens"
        report.shown.append(console.text(f"Wrote {directory}, {note}, after step {done.step:,}"))
