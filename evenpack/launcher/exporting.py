"""Export of a checkpoint for Hugging Face transformers, for `evenpack export` and the library."""

from dataclasses import dataclass
from pathlib import Path

import torch

from evenpack.engine.config import RunConfig
from evenpack.launcher.processes.devices import settle_accelerator
from evenpack.launcher.trained import StepOrBest, load_trained_model
from evenpack.models.huggingface import to_huggingface


@dataclass(frozen=True, kw_only=True)
class Export:
    """A checkpoint that transformers loads."""

    directory: Path
    step: int
    """Optimizer updates after which it was saved."""
    tokenizer: bool
    """Whether the tokenizer was written too; False if the sources hold tokens."""


def export_run(config: RunConfig, directory: Path, *, step: StepOrBest = None) -> Export:
    """Writes the run's newest complete checkpoint, or that after `step` steps, or the best, into a new folder.

    Raises: as `load_trained_model`; ConfigError if transformers has no such model, or if `directory` is not empty.
    """
    settle_accelerator()
    trained = load_trained_model(config, torch.device("cpu"), step=step)
    tokenizer = trained.run.prepared.tokenizer_dir if trained.run.prepared.tokenizer_dir.is_dir() else None
    to_huggingface(trained.model, directory, tokenizer_dir=tokenizer, special_token_id=trained.special_token_id)
    return Export(directory=directory, step=trained.checkpoint.step, tokenizer=tokenizer is not None)
