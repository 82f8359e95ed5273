"""Trains and evaluates one seed: an encoder with a new head. A plain loop of torch in one process."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from evenpack.data.order.selection import PackSelection
from evenpack.engine.optimizers.build import parameter_groups
from evenpack.engine.optimizers.config import ScheduleSection
from evenpack.engine.optimizers.schedules import learning_rate
from evenpack.errors import RunError
from evenpack.finetuning.batches import FinetuneBatch, FinetuneCollator, StepOrder
from evenpack.finetuning.config import FinetuneConfig, FinetuneTrainingSection
from evenpack.finetuning.data import TaskData
from evenpack.finetuning.features import Features
from evenpack.finetuning.model import FinetunedModel
from evenpack.finetuning.results import SeedResult
from evenpack.finetuning.tasks import TaskScores

_EVALUATION_PACKS = 32
"""Packs evaluated at once; has no influence on any result."""

_BETAS = (0.9, 0.999)
_EPSILON = 1e-8


@dataclass(frozen=True, kw_only=True)
class Finetuning:
    """The parts that all seeds share."""

    config: FinetuneConfig
    data: TaskData
    padding_token: int
    device: torch.device

    def step_order(self, seed: int) -> StepOrder:
        """Returns the order of the training sequences under `seed`."""
        training = self.config.training
        return StepOrder(
            lengths=self.data.training.lengths,
            pack_length=self.config.data.max_sequence_length,
            layout=training.layout,
            batching=training.batching,
            items_per_step=training.items_per_step,
            seed=seed,
        )

    def collator(self, features: Features) -> FinetuneCollator:
        """Returns the collator for the run's layout."""
        return FinetuneCollator(
            features=features,
            layout=self.config.training.layout,
            max_sequence_length=self.config.data.max_sequence_length,
            padding_token=self.padding_token,
        )


@dataclass(kw_only=True)
class _Counts:
    """Counts over the training steps of a seed."""

    sequences: list[int] = field(default_factory=list)
    """Sequences of each step."""
    packs: int = 0
    tokens: int = 0
    slots: int = 0
    seconds: float = 0.0

    def add(self, packs: PackSelection, *, slots: int, seconds: float) -> None:
        self.sequences.append(len(packs.sequence_ids))
        self.packs += packs.packs
        self.tokens += int(packs.lengths.sum())
        self.slots += slots
        self.seconds += seconds


@dataclass(frozen=True, kw_only=True)
class StepDone:
    """A finished step, for progress."""

    step: int
    steps: int
    loss: float
    sequences: int
    """Sequences so far."""


def train_seed(
    finetuning: Finetuning, model: FinetunedModel, seed: int, *, on_step: Callable[[StepDone], None]
) -> SeedResult:
    """Trains `model` in place on the device of `finetuning`, and evaluates it after each epoch.

    Raises: RunError after the first step whose loss is not finite, or after which a prediction is not.
    """
    training = finetuning.config.training
    order = finetuning.step_order(seed)
    trainer = Trainer(model.to(finetuning.device), training, steps=training.epochs * order.steps_per_epoch)
    collator = finetuning.collator(finetuning.data.training)
    counts = _Counts()
    losses_by_epoch: list[float] = []
    scores_by_epoch: list[dict[str, TaskScores]] = []
    torch.manual_seed(seed)  # of dropout
    for epoch in range(training.epochs):
        loss_sum = 0.0
        for packs in order.epoch(epoch):
            began = time.perf_counter()
            loss, slots = trainer.step(collator, packs)
            if not math.isfinite(loss):
                raise _diverged(trainer, seed, f"the loss is {loss}")
            counts.add(packs, slots=slots, seconds=time.perf_counter() - began)
            loss_sum += loss * len(packs.sequence_ids)
            on_step(StepDone(step=trainer.steps_done, steps=trainer.steps, loss=loss, sequences=sum(counts.sequences)))
        losses_by_epoch.append(loss_sum / finetuning.data.training.sequences)
        scores_by_epoch.append({})
        for name, found in finetuning.data.evaluation.items():
            outputs = predict(finetuning, model, found.features)
            if not all(np.isfinite(one).all() for one in outputs):
                raise _diverged(trainer, seed, f"predictions for {name} are not finite after it")
            scores_by_epoch[-1][name] = found.score(outputs)
    return _result(seed, counts, losses_by_epoch, scores_by_epoch)


class Trainer:
    """Updates a model by AdamW under a linear warm-up and decay.

    Args:
        steps: number in the whole schedule.
    """

    def __init__(self, model: FinetunedModel, training: FinetuneTrainingSection, *, steps: int) -> None:
        self.model = model
        self.training = training
        self.steps = steps
        self.steps_done = 0
        self._schedule = ScheduleSection(
            kind="linear", warmup_steps=round(training.warmup_fraction * steps), final_fraction=0.0
        )
        self._optimizer = torch.optim.AdamW(
            parameter_groups(model, weight_decay=training.weight_decay),
            lr=training.learning_rate,
            betas=_BETAS,
            eps=_EPSILON,
            fused=True,  # on CPUs, too: 10 ms per update of a small model instead of 45, most of them in square roots
        )

    def step(self, collator: FinetuneCollator, packs: PackSelection) -> tuple[float, int]:
        """Updates by the mean loss over the sequences of `packs`; returns that loss, and the slots computed."""
        self.model.train()
        loss, slots = self.accumulate(collator, packs)
        if self.training.gradient_clipping is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.training.gradient_clipping)
        self.steps_done += 1
        rate = learning_rate(
            self.steps_done, peak=self.training.learning_rate, steps=self.steps, schedule=self._schedule
        )
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss, slots

    def accumulate(self, collator: FinetuneCollator, packs: PackSelection) -> tuple[float, int]:
        """Adds the gradients of the mean loss over all sequences, for any division into micro-batches."""
        device = next(self.model.parameters()).device
        total, slots = torch.zeros((), device=device), 0
        for batch in _micro_batches(collator, packs, self.training.packs_per_micro_batch):
            with _precision(self.training, device):
                loss = self.model.losses(batch.to(device)).sum() / len(packs.sequence_ids)
            torch.autograd.backward(loss)
            total += loss.detach()
            slots += len(batch.tokens)
        return float(total), slots


def _diverged(trainer: Trainer, seed: int, what: str) -> RunError:
    training = trainer.training
    return RunError(
        f"seed {seed}, step {trainer.steps_done} of {trainer.steps}: {what}. The training has diverged, and no "
        f"result of this seed is written. Lower training.learning_rate ({training.learning_rate:g}) or raise "
        f"training.warmup_fraction ({training.warmup_fraction:g}), and give another run.output_dir, or remove this one"
    )


@torch.no_grad()
def predict(finetuning: Finetuning, model: FinetunedModel, features: Features) -> list[np.ndarray]:
    """Returns the model's outputs for each sequence."""
    model.eval()
    outputs: list[np.ndarray] = [np.empty(0)] * features.sequences
    order = StepOrder(
        lengths=features.lengths,
        pack_length=finetuning.config.data.max_sequence_length,
        layout=finetuning.config.training.layout,
        batching="packs",
        items_per_step=_EVALUATION_PACKS,
        seed=0,
    )
    collator = finetuning.collator(features)
    for packs in order.epoch(0):
        batch = collator.collate(packs).to(finetuning.device)
        with _precision(finetuning.config.training, finetuning.device):
            parts = model.head.by_sequence(model(batch).float(), batch)
        for sequence_id, part in zip(batch.sequence_ids.tolist(), parts, strict=True):
            outputs[sequence_id] = part.cpu().numpy()
    return outputs


def _micro_batches(
    collator: FinetuneCollator, packs: PackSelection, packs_per_micro_batch: int | None
) -> Iterator[FinetuneBatch]:
    size = packs_per_micro_batch or packs.packs
    for first in range(0, packs.packs, size):
        yield collator.collate(packs.take(np.arange(first, min(first + size, packs.packs))))


def _precision(training: FinetuneTrainingSection, device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=training.precision == "bf16_autocast")


def _result(
    seed: int, counts: _Counts, losses_by_epoch: list[float], scores_by_epoch: list[dict[str, TaskScores]]
) -> SeedResult:
    values = [{name: scores.values for name, scores in epoch.items()} for epoch in scores_by_epoch]
    sequences, steps = sum(counts.sequences), len(counts.sequences)
    return SeedResult(
        seed=seed,
        metrics=values[-1],
        intervals={name: scores.intervals() for name, scores in scores_by_epoch[-1].items()},
        metrics_by_epoch=values,
        losses_by_epoch=losses_by_epoch,
        steps=steps,
        sequences_per_step=sequences / steps,
        least_sequences_per_step=min(counts.sequences),
        most_sequences_per_step=max(counts.sequences),
        packs_per_step=counts.packs / steps,
        sequences_per_pack=sequences / counts.packs,
        padding_share=1 - counts.tokens / counts.slots,
        training_seconds=counts.seconds,
        sequences_per_second=sequences / counts.seconds,
    )
