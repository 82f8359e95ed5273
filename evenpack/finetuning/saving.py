"""Tuned models in the output directory, as folders that transformers loads.

OUTPUT_DIR/seed_3/             the model of seed 3
OUTPUT_DIR/.seed_3.candidate/  the same, until the median seed is known
"""

import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenpack.data.tokenizers.tokenizer import Tokenizer
from evenpack.finetuning.config import FinetuneConfig
from evenpack.finetuning.heads import FinetunedModel
from evenpack.finetuning.results import Summary
from evenpack.finetuning.tasks import AnyTask, SentenceTask
from evenpack.models.common.section import TransformerConfig
from evenpack.models.huggingface import task_model_of, task_model_to_huggingface

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SavedModels:
    """The models of a run's seeds that `run.save_models` selects."""

    config: FinetuneConfig
    tokenizer: Tokenizer

    def require(self, section: TransformerConfig) -> None:
        """Checks the setting. Raises: ConfigError if transformers has no such model."""
        if self.config.run.save_models is not None:
            task_model_of(section, "span" if self.config.data.definition.predicts == "span" else "sequence")

    def save(self, model: FinetunedModel, seed: int) -> None:
        """Saves the model of a seed that has just been trained, if it is requested."""
        if self.config.run.save_models is not None:
            self._write(model, self._folder(seed) if self.config.run.save_models == "all" else self._candidate(seed))

    def missing(self, summary: Summary) -> list[int]:
        """Returns the seeds whose models are requested and were not saved when they were trained."""
        return [
            seed
            for seed in self._wanted(summary)
            if not (self._folder(seed).is_dir() or self._candidate(seed).is_dir())
        ]

    def settle(self, summary: Summary) -> None:
        """Renames the requested models to their final names, after all seeds are done."""
        for seed in self._wanted(summary):
            if self._candidate(seed).is_dir():
                shutil.rmtree(self._folder(seed), ignore_errors=True)
                self._candidate(seed).replace(self._folder(seed))
            log.info("the model of seed %d, for transformers, is in %s", seed, self._folder(seed))
        for seed in self.config.run.seeds:
            shutil.rmtree(self._candidate(seed), ignore_errors=True)

    def _wanted(self, summary: Summary) -> Sequence[int]:
        which = self.config.run.save_models
        if which is None:
            return ()
        return (summary.median_seed,) if which == "median" else self.config.run.seeds

    def _write(self, model: FinetunedModel, directory: Path) -> None:
        task_model_to_huggingface(
            model.encoder,
            model.head,
            model.head.reads,
            directory,
            save_tokenizer=self.tokenizer.save,
            special_token_id=self.tokenizer.padding_id,
            about_task=_about(self.config.data.definition),
        )

    def _folder(self, seed: int) -> Path:
        return self.config.run.output_dir / f"seed_{seed}"

    def _candidate(self, seed: int) -> Path:
        return self.config.run.output_dir / f".seed_{seed}.candidate"


def _about(task: AnyTask) -> dict[str, Any]:
    """Returns the task's part of transformers' config.json: its labels, and the loss for further training."""
    if not isinstance(task, SentenceTask):
        return {}
    labels = task.glue.labels or ("score",)
    return {
        "id2label": {str(index): label for index, label in enumerate(labels)},
        "label2id": {label: index for index, label in enumerate(labels)},
        "problem_type": "single_label_classification" if task.predicts == "class" else "regression",
    }
