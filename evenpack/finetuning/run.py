"""Fine-tuning from a run file to its results, one seed after another, and the tuned models for transformers.

OUTPUT_DIR/seed_3/             the model of seed 3
OUTPUT_DIR/.seed_3.candidate/  the same, until the median seed is known
"""

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from evenpack.data.tokenizers.tokenizer import Tokenizer
from evenpack.engine.resolving.attention_choice import attention_request, check_request
from evenpack.finetuning.config import FinetuneConfig
from evenpack.finetuning.data import TaskData, read_task
from evenpack.finetuning.model import HEADS, FinetunedModel, Pretrained, new_head, read_pretrained
from evenpack.finetuning.results import ResultFolder, SeedResult, Summary, summarise
from evenpack.finetuning.tasks import AnyTask, SentenceTask, require_metrics
from evenpack.finetuning.train import Finetuning, train_seed
from evenpack.models.common.section import TransformerConfig
from evenpack.models.huggingface import task_model_of, task_model_to_huggingface
from evenpack.progress import Progress

log = logging.getLogger(__name__)


def finetune(
    config: FinetuneConfig, progress: Progress, *, hold: Callable[[Path], AbstractContextManager[None]]
) -> Summary:
    """Trains and evaluates each seed that has no result yet, or whose requested model was not saved.

    All input is read and checked before anything is written.

    Args:
        hold: makes the output directory, and keeps other processes from writing into it.

    Raises: ConfigError, CheckpointError or DataError for invalid input, or an output directory with results of other
        settings; and what `hold` raises.
    """
    require_metrics()
    pretrained = read_pretrained(config)
    models = SavedModels(config=config, tokenizer=pretrained.tokenizer)
    models.require(pretrained.section)
    data = read_task(config.data, pretrained.tokenizer)
    settings = _settings(config, pretrained, data)
    folder = ResultFolder(config.run.output_dir)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    log.info("fine-tuning on %s", device)
    if any(folder.read(seed) is None for seed in config.run.seeds):
        request = attention_request(pretrained.section, config.training.precision, device.type)
        check_request(config.attention, request, dropout_key="training.dropout")
    with hold(folder.directory):
        folder.open(settings)
        finetuning = Finetuning(config=config, data=data, tokenizer=pretrained.tokenizer, device=device)

        def train(seed: int) -> SeedResult:
            model = new_finetuned(config, pretrained, seed)
            result = train_seed(finetuning, model, seed, progress)
            models.save(model, seed)
            folder.write(result)
            return result

        done = {}
        for seed in config.run.seeds:
            found = folder.read(seed)
            if found is not None:
                log.info("seed %d is already done", seed)
            done[seed] = found or train(seed)
        summary = _summarise(config, data, settings, done)
        while missing := models.missing(summary):
            log.info("seed %d is trained again, because its model was not saved", missing[0])
            done[missing[0]] = train(missing[0])
            summary = _summarise(config, data, settings, done)
        models.settle(summary)
        folder.write_summary(summary)
        return summary


def _summarise(
    config: FinetuneConfig, data: TaskData, settings: dict[str, Any], done: Mapping[int, SeedResult]
) -> Summary:
    task = config.data.definition
    guesses = {name: found.score_guesses(data.training) for name, found in data.evaluation.items()}
    return summarise(
        task.title,
        task.metrics[0],
        [done[seed] for seed in config.run.seeds],
        settings=settings,
        guesses={name: scores.values for name, scores in guesses.items() if scores is not None},
    )


def new_finetuned(config: FinetuneConfig, pretrained: Pretrained, seed: int) -> FinetunedModel:
    """Returns the pretrained encoder with a new head of `seed`, on the CPU."""
    task = config.data.definition
    encoder = pretrained.new_encoder()
    head = new_head(encoder, task.predicts, outputs=task.outputs, dropout=config.training.dropout, seed=seed)
    return FinetunedModel(encoder, head)


def _settings(config: FinetuneConfig, pretrained: Pretrained, data: TaskData) -> dict[str, Any]:
    """Returns all settings on which a seed's result depends, which identify results."""
    sections = config.model_dump(mode="json")
    chosen = {
        f"{section}.{key}": value
        for section in ("data", "training", "attention")
        for key, value in sections[section].items()
        if key not in ("folder", "initialize_from", "packs_per_micro_batch")
    }
    files = {f"file {name}": checksum for name, checksum in data.checksums.items()}
    return chosen | {"weights": pretrained.origin, "tokenizer": pretrained.tokenizer.checksum} | files


@dataclass(frozen=True, kw_only=True)
class SavedModels:
    """The models of a run's seeds that `run.save_models` selects."""

    config: FinetuneConfig
    tokenizer: Tokenizer

    def require(self, section: TransformerConfig) -> None:
        """Checks the setting. Raises: ConfigError if transformers has no such model."""
        if self.config.run.save_models is not None:
            task_model_of(section, HEADS[self.config.data.definition.predicts].reads)

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
