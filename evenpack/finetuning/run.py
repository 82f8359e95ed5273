"""Fine-tuning from a run file to its results: every seed, one after another."""

import logging
from typing import Any

import torch

from evenpack.finetuning.config import FinetuneConfig
from evenpack.finetuning.data import TaskData, read_task
from evenpack.finetuning.heads import FinetunedModel, new_head
from evenpack.finetuning.metrics import require_metrics
from evenpack.finetuning.pretrained import Pretrained, read_pretrained
from evenpack.finetuning.results import ResultFolder, Summary, summarise
from evenpack.finetuning.train import Finetuning, StepDone, train_seed
from evenpack.progress import Piece, Progress

log = logging.getLogger(__name__)


def finetune(config: FinetuneConfig, progress: Progress) -> Summary:
    """Trains and judges each seed that has no result yet.

    All input is read and checked before anything is written. Raises: ConfigError, CheckpointError or DataError for
    input that is wrong, or an output directory with results of other settings.
    """
    require_metrics()
    pretrained = read_pretrained(config)
    data = read_task(config.data, config.folder, pretrained.tokenizer)
    settings = _settings(config, pretrained, data)
    folder = ResultFolder(config.run.output_dir)
    folder.open(settings)
    finetuning = Finetuning(config=config, data=data, padding_token=pretrained.tokenizer.padding_id, device=_device())
    seeds = []
    for seed in config.run.seeds:
        result = folder.read(seed)
        if result is None:
            result = train_seed(
                finetuning, new_finetuned(config, pretrained, seed), seed, on_step=_Shown(progress, seed).update
            )
            folder.write(result)
        else:
            log.info("seed %d was done before", seed)
        seeds.append(result)
    task = config.data.definition
    guesses = {name: found.judge_guesses(data.training) for name, found in data.evaluation.items()}
    summary = summarise(
        task.title,
        task.metrics[0],
        seeds,
        settings=settings,
        guesses={name: judgement.values for name, judgement in guesses.items() if judgement is not None},
    )
    folder.write_summary(summary)
    return summary


def new_finetuned(config: FinetuneConfig, pretrained: Pretrained, seed: int) -> FinetunedModel:
    """The pretrained encoder under a new head of `seed`, on the CPU."""
    task = config.data.definition
    encoder = pretrained.new_encoder()
    head = new_head(encoder, task.predicts, outputs=task.outputs, dropout=config.training.dropout, seed=seed)
    return FinetunedModel(encoder, head)


class _Shown:
    """The progress of a seed."""

    def __init__(self, progress: Progress, seed: int) -> None:
        self._piece: Piece = progress.begin(f"seed {seed}: step", unit="sequences", counted=True)

    def update(self, done: StepDone) -> None:
        self._piece.update(done.step, done.steps, amount=done.sequences, facts=[f"loss {done.loss:.4f}"])


def _settings(config: FinetuneConfig, pretrained: Pretrained, data: TaskData) -> dict[str, Any]:
    """All that decides a seed's result, by which results of other settings are told apart."""
    sections = config.model_dump(mode="json")
    chosen = {
        f"{section}.{key}": value
        for section in ("data", "training", "attention")
        for key, value in sections[section].items()
        if key not in ("folder", "initialize_from", "packs_per_micro_batch")
    }
    files = {f"file {name}": checksum for name, checksum in data.checksums.items()}
    return chosen | {"weights": pretrained.origin, "tokenizer": pretrained.tokenizer.checksum} | files


def _device() -> torch.device:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    log.info("fine-tuning on %s", device)
    return device
