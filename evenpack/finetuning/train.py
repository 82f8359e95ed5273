"""Trains and evaluates one seed: an encoder with a new head. A plain loop of torch in one process."""

import math
import time
from dataclasses import dataclass

import numpy as np
import torch

from evenpack.data.batches.collate import Collator
from evenpack.data.order.step_plan import StepPlan
from evenpack.data.order.step_shape import Batching, CostWeights, StepShape
from evenpack.data.sequences import LabelledSequences
from evenpack.data.tokenizers.tokenizer import Tokenizer
from evenpack.engine.optimizers.build import build_optimizer
from evenpack.engine.optimizers.config import ScheduleSection
from evenpack.engine.optimizers.norms import clip_gradients
from evenpack.engine.optimizers.schedules import learning_rate
from evenpack.errors import RunError
from evenpack.finetuning.config import FinetuneConfig, FinetuneTrainingSection
from evenpack.finetuning.data import TaskData
from evenpack.finetuning.model import HEADS, FinetunedModel
from evenpack.finetuning.results import SeedResult
from evenpack.finetuning.steps import EpochPlanner, SequenceLabels, packed_source
from evenpack.finetuning.tasks import TaskScores
from evenpack.losses import StepCounts
from evenpack.models.common.loss_sums import LossOutputs, exact_denominators, scaled_loss
from evenpack.progress import Progress

_EVALUATION_PACKS = 32
"""Packs evaluated at once; has no influence on any result."""


@dataclass(frozen=True, kw_only=True)
class Finetuning:
    """The parts that all seeds share."""

    config: FinetuneConfig
    data: TaskData
    tokenizer: Tokenizer
    device: torch.device

    def planner(self, seed: int) -> EpochPlanner:
        """Returns the steps over the training sequences under `seed`."""
        training = self.config.training
        shape = self._shape("sequences", training.sequences_per_step, training.packs_per_micro_batch)
        return EpochPlanner(source=packed_source(self.data.training, seed=seed), shape=shape, seed=seed)

    def evaluation_planner(self, sequences: LabelledSequences) -> EpochPlanner:
        """Returns the order in which sequences are evaluated, as the steps of its first epoch."""
        shape = self._shape("packs", _EVALUATION_PACKS, None)
        return EpochPlanner(source=packed_source(sequences, seed=0), shape=shape, seed=0)

    def collator(self, planner: EpochPlanner) -> Collator:
        """Returns the collator of the planner's steps."""
        return Collator(
            [planner.source],
            shape=planner.shape,
            objective=SequenceLabels(loss=HEADS[self.config.data.definition.predicts].loss),
            pack_length=self.config.data.max_sequence_length,
            padding_token=self.tokenizer.padding_id,
            vocabulary_size=self.tokenizer.vocabulary_size,
            fills_rows=False,
        )

    def _shape(self, batching: Batching, items_per_step: int, packs_per_micro_batch: int | None) -> StepShape:
        return StepShape(
            batching=batching,
            items_per_step=items_per_step,
            items_per_micro_batch=packs_per_micro_batch or items_per_step,
            layout=self.config.training.layout,
            isolate=True,
            reset_positions=True,
            policy="arrival",
            cost_weights=CostWeights(per_token=0.0, per_squared_length=0.0, per_segment=0.0),
            windows=(),
            balances_each_micro_batch=False,
        )


def train_seed(finetuning: Finetuning, model: FinetunedModel, seed: int, progress: Progress) -> SeedResult:
    """Trains `model` in place on the device of `finetuning`, and evaluates it after each epoch.

    Raises: RunError after the first step whose loss is not finite, or after which a prediction is not.
    """
    training = finetuning.config.training
    planner = finetuning.planner(seed)
    trainer = Trainer(model.to(finetuning.device), training, steps=training.epochs * planner.steps_per_epoch)
    collator = finetuning.collator(planner)
    shown = progress.begin(f"seed {seed}: step", unit="sequences", counted=True)
    counts: list[StepCounts] = []
    sequences, slots, seconds = 0, 0, 0.0
    losses_by_epoch: list[float] = []
    scores_by_epoch: list[dict[str, TaskScores]] = []
    torch.manual_seed(seed)  # of dropout
    for epoch in range(training.epochs):
        loss_sum = 0.0
        for step in range(epoch * planner.steps_per_epoch, (epoch + 1) * planner.steps_per_epoch):
            plan = planner.plan(step)
            began = time.perf_counter()
            loss, slots_of_step = trainer.step(collator, plan)
            if not math.isfinite(loss):
                raise _diverged(trainer, seed, f"the loss is {loss}")
            seconds += time.perf_counter() - began
            slots += slots_of_step
            counts.append(plan.counts)
            sequences += plan.counts.sequences
            loss_sum += loss * plan.counts.sequences
            shown.update(trainer.steps_done, trainer.steps, amount=sequences, facts=[f"loss {loss:.4f}"])
        losses_by_epoch.append(loss_sum / finetuning.data.training.count)
        scores_by_epoch.append({})
        for name, found in finetuning.data.evaluation.items():
            outputs = predict(finetuning, model, found.sequences)
            if not all(np.isfinite(one).all() for one in outputs):
                raise _diverged(trainer, seed, f"predictions for {name} are not finite after it")
            scores_by_epoch[-1][name] = found.score(outputs)
    values = [{name: scores.values for name, scores in epoch.items()} for epoch in scores_by_epoch]
    total = sum(counts[1:], counts[0])
    return SeedResult(
        seed=seed,
        metrics=values[-1],
        intervals={name: scores.intervals() for name, scores in scores_by_epoch[-1].items()},
        metrics_by_epoch=values,
        losses_by_epoch=losses_by_epoch,
        steps=len(counts),
        sequences_per_step=total.sequences / len(counts),
        least_sequences_per_step=min(step.sequences for step in counts),
        most_sequences_per_step=max(step.sequences for step in counts),
        packs_per_step=total.packs / len(counts),
        sequences_per_pack=total.sequences / total.packs,
        padding_share=1 - total.tokens / slots,
        training_seconds=seconds,
        sequences_per_second=total.sequences / seconds,
    )


class Trainer:
    """Updates a model by AdamW under a linear warm-up and decay, as `TrainingEngine` does for one rank of ZeRO 0.

    Args:
        model: on the device on which it is trained.
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
        self._device = next(model.parameters()).device
        self._optimizer = build_optimizer(model, training.optimizer, self._device, fused_on_cpu=True)

    def step(self, collator: Collator, plan: StepPlan) -> tuple[float, int]:
        """Updates by the mean loss over the sequences of a step; returns that loss, and the slots computed."""
        self.model.train()
        loss, slots = self.accumulate(collator, plan)
        clip_gradients(self.model, self.training.gradient_clipping)
        peak = self.training.learning_rate
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self.steps_done, peak=peak, steps=self.steps, schedule=self._schedule)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.steps_done += 1
        return loss, slots

    def accumulate(self, collator: Collator, plan: StepPlan) -> tuple[float, int]:
        """Adds the gradients of the mean loss over all sequences, for any division into micro-batches."""
        total, slots = torch.zeros((), device=self._device), 0
        for index in range(plan.micro_batches):
            batch = collator.collate(plan.micro_batch(0, index), plan.counts)
            with _precision(self.training, self._device):
                outputs: LossOutputs = self.model(batch.to(self._device))
            denominators = exact_denominators(self.model.losses, batch.step_counts)
            loss = scaled_loss(outputs, denominators, world_size=1, accumulation=1)
            torch.autograd.backward(loss)
            total += loss.detach()
            slots += batch.slots
        return float(total), slots


def _diverged(trainer: Trainer, seed: int, what: str) -> RunError:
    training = trainer.training
    return RunError(
        f"seed {seed}, step {trainer.steps_done} of {trainer.steps}: {what}. The training has diverged, and no "
        f"result of this seed is written. Lower training.learning_rate ({training.learning_rate:g}) or raise "
        f"training.warmup_fraction ({training.warmup_fraction:g}), and give another run.output_dir, or remove this one"
    )


@torch.no_grad()
def predict(finetuning: Finetuning, model: FinetunedModel, sequences: LabelledSequences) -> list[np.ndarray]:
    """Returns the model's outputs for each sequence."""
    model.eval()
    outputs: list[np.ndarray] = [np.empty(0)] * sequences.count
    planner = finetuning.evaluation_planner(sequences)
    collator = finetuning.collator(planner)
    for step in range(planner.steps_per_epoch):
        plan = planner.plan(step)
        batch = collator.collate(plan.packs, plan.counts).to(finetuning.device)
        with _precision(finetuning.config.training, finetuning.device):
            parts = model.head.by_sequence(model.outputs(batch).float(), batch)
        for sequence_id, part in zip(plan.packs.sequence_ids.tolist(), parts, strict=True):
            outputs[sequence_id] = part.cpu().numpy()
    return outputs


def _precision(training: FinetuneTrainingSection, device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=training.precision == "bf16_autocast")
