"""Fine-tuning from a run file to its results, one seed after another, and the tuned models for transformers.

OUTPUT_DIR/seed_3/    the model of seed 3
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
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
    if config.run.save_models:
        task_model_of(pretrained.section, HEADS[config.data.definition.predicts].reads)
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
        results = []
        for seed in config.run.seeds:
            result = folder.read(seed)
            if result is None or (config.run.save_models and not model_folder(config, seed).is_dir()):
                model = new_finetuned(config, pretrained, seed)
                result = train_seed(finetuning, model, seed, progress)
                if config.run.save_models:
                    save_model(config, pretrained.tokenizer, model, seed)
                folder.write(result)
            else:
                log.info("seed %d is already done", seed)
            results.append(result)
        summary = _summarise(config, data, settings, results)
        folder.write_summary(summary)
        return summary


def _summarise(
    config: FinetuneConfig, data: TaskData, settings: dict[str, Any], results: Sequence[SeedResult]
) -> Summary:
    task = config.data.definition
    guesses = {name: found.score_guesses(data.training) for name, found in data.evaluation.items()}
    return summarise(
        task.title,
        task.metrics[0],
        results,
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


def model_folder(config: FinetuneConfig, seed: int) -> Path:
    """Returns the folder of a seed's model."""
    return config.run.output_dir / f"seed_{seed}"


def save_model(config: FinetuneConfig, tokenizer: Tokenizer, model: FinetunedModel, seed: int) -> None:
    """Writes a tuned model for transformers."""
    directory = model_folder(config, seed)
    task_model_to_huggingface(
        model.encoder,
        model.head,
        model.head.reads,
        directory,
        save_tokenizer=tokenizer.save,
        special_token_id=tokenizer.padding_id,
        about_task=_about(config.data.definition),
    )
    log.info("the model of seed %d, for transformers, is in %s", seed, directory)


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
