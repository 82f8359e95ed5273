"""The command `evenpack export`."""

from pathlib import Path
from typing import Annotated

import typer

from evenpack.launcher.cli.arguments import AsJson, Overrides, RunFile, load, reporting


def export(
    run_file: RunFile,
    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="Folder to create.", show_default=False)],
    overrides: Overrides = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint for Hugging Face transformers.

    Uses the newest checkpoint of the run. The class of the run's model in transformers loads it
    (`GPT2LMHeadModel`, `LlamaForCausalLM`, `BertForPreTraining`) by `.from_pretrained(DIRECTORY)`.

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
        tokenizer = trained.run.prepared.tokenizer_dir if trained.run.prepared.tokenizer_dir.is_dir() else None
        to_huggingface(trained.model, directory, tokenizer_dir=tokenizer, special_token_id=trained.special_token_id)
        report.value = {"directory": directory, "step": trained.checkpoint.step, "tokenizer": tokenizer is not None}
        note = "with its tokenizer" if tokenizer else "without a tokenizer: its source holds tokens"
        report.shown.append(console.text(f"Wrote {directory}, {note}, after step {trained.checkpoint.step:,}"))
