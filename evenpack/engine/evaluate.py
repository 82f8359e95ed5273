"""Computes loss, perplexity and accuracy on each source's held-out documents, independent of the number of ranks."""

import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

import torch
from jaxtyping import Float64
from torch import Tensor, nn

from evenpack.batch import PackedBatch
from evenpack.data.batches.pipeline import evaluation_batches
from evenpack.data.prepared import PreparedData, Split
from evenpack.engine.activity import doing
from evenpack.engine.resolving.resolve import ResolvedRun
from evenpack.engine.world.distributed import World
from evenpack.losses import LOSSES, NO_COUNTS, StepCounts
from evenpack.models.common.loss_sums import LossOutputs
from evenpack.models.common.section import TransformerConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LossEvaluation:
    """Result of evaluating one loss."""

    loss: float
    """Mean in nats over what the loss is divided by; never over packs, so that results of all runs compare."""
    accuracy: float | None
    """Fraction of the targets that were predicted correctly; None for a loss without targets."""


@dataclass(frozen=True, kw_only=True)
class SourceEvaluation:
    """Result of evaluating the model on one source's held-out documents."""

    loss: float
    """Mean of the main loss in nats, for next tokens or masked ones (`model.mlm_reduction` sets the mean)."""
    accuracy: float
    """Fraction of the targets whose token had the highest probability."""
    others: Mapping[str, LossEvaluation]
    """The model's other losses, by name."""
    targets: int
    """Number of positions that count in the loss."""
    sequences: int
    packs: int

    @property
    def perplexity(self) -> float:
        """Returns exp(loss); infinite beyond the range of a float."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf

    def to_json(self) -> dict[str, float | int]:
        values = {
            "loss": self.loss,
            "perplexity": self.perplexity,
            "accuracy": self.accuracy,
            "targets": self.targets,
            "sequences": self.sequences,
            "packs": self.packs,
        }
        for loss in LOSSES:
            found = self.others.get(loss.name)
            if found is not None:
                values[loss.metric] = found.loss
                if loss.accuracy is not None and found.accuracy is not None:
                    values[loss.accuracy] = found.accuracy
        return values


Evaluations = dict[str, SourceEvaluation]
"""Evaluations of the sources that have held-out documents, by name."""


def overall_accuracy(evaluations: Evaluations) -> float | None:
    """Returns the fraction of all sources' targets that were predicted correctly; None if nothing was held out."""
    targets = sum(found.targets for found in evaluations.values())
    correct = sum(round(found.accuracy * found.targets) for found in evaluations.values())
    return correct / targets if targets else None


@torch.no_grad()
def evaluate_model(
    model: nn.Module,
    run: ResolvedRun,
    world: World,
    *,
    split: Split = "validation",
    most_batches: int | None = None,
) -> Evaluations:
    """Evaluates `model`, called as `model(batch) -> LossOutputs`, on each source's validation packs, by source name.

    All ranks call it with the same weights and get the same result. Packs are assigned to the ranks one by one, and
    a rank may have one batch fewer than another. At ZeRO 3, where a forward pass gathers parameters from all ranks, it
    then computes a batch that does not count. Sums are kept in float64 and reduced over ranks once. The model's mode
    (training or evaluation) is restored.

    Args:
        most_batches: of each source on each rank; None: all.

    A source without held-out targets is not in the result, and rank 0 logs a warning with its name.
    """
    prepared, config = run.prepared, run.config
    precision = torch.autocast(
        world.device.type, dtype=torch.bfloat16, enabled=config.training.precision == "bf16_autocast"
    )
    was_training = model.training
    model.eval()
    try:
        with precision:
            sums = torch.stack(
                [
                    _sum_source(model, run, world, islice(_in_step(run, name, world, split), most_batches))
                    for name in prepared.source_names
                ]
            )
    finally:
        model.train(was_training)
    totals = world.all_sum(sums.flatten()).view(sums.shape).tolist()
    evaluations = {
        name: _divide(config.model, total)
        for name, total in zip(prepared.source_names, totals, strict=True)
        if total[_TARGETS] > 0
    }
    absent = [name for name in prepared.source_names if name not in evaluations]
    if absent and world.is_main and most_batches is None:
        log.warning(
            "no validation loss for %s: nothing to predict was held out (data.validation_fraction is %g)",
            ", ".join(absent),
            config.data.validation_fraction,
        )
    return evaluations


def validation_batches(
    run: ResolvedRun, source: str, *, rank: int, ranks: int, split: Split = "validation"
) -> Iterator[PackedBatch]:
    """Yields a rank's share of the validation batches of a source; none if it holds nothing out."""
    if run.prepared.view(source, split).count == 0:
        return iter(())
    return evaluation_batches(
        run.prepared,
        source,
        objective=run.objective,
        shape=run.evaluation_shape,
        rank=rank,
        ranks=ranks,
        max_packs=run.config.training.evaluation_packs,
        seed=run.config.run.seed,
        split=split,
    )


def evaluations_to_json(prepared: PreparedData, evaluations: Evaluations) -> dict[str, dict[str, float | int] | None]:
    """Returns the evaluations by source name; null for a source with nothing held out."""
    return {name: evaluations[name].to_json() if name in evaluations else None for name in prepared.source_names}


def _sum_source(
    model: nn.Module,
    run: ResolvedRun,
    world: World,
    batches: Iterable[tuple[PackedBatch, bool]],
) -> Float64[Tensor, " sums"]:
    """Returns this rank's sums for a source, from its batches and whether each counts.

    They are the numbers of targets, sequences and packs, then for each loss of the model its sum and the number of
    correct targets.
    """
    losses = [loss.name for loss in run.config.model.losses]
    sums = torch.zeros(2 * len(losses), dtype=torch.float64, device=world.device)
    counts = NO_COUNTS
    for batch, counts_here in batches:
        doing.tick()  # a batch is progress
        outputs: LossOutputs = model(batch.to(world.device, non_blocking=True))
        if not counts_here:
            continue
        # Summed on the device, so that no batch waits for the previous one.
        parts = [part for name in losses for part in outputs[name]]
        sums += torch.stack([sums.new_zeros(()) if part is None else part.double() for part in parts])
        counts += batch.local_counts
    host_counts = torch.tensor([counts.targets, counts.sequences, counts.packs], dtype=torch.float64)
    return torch.cat([host_counts, sums.cpu()])


def _in_step(run: ResolvedRun, source: str, world: World, split: Split) -> Iterator[tuple[PackedBatch, bool]]:
    """Yields this rank's batches, and whether each counts; where forward passes are collective, equally many on all."""
    mine = validation_batches(run, source, rank=world.rank, ranks=world.size, split=split)
    if world.size == 1 or not run.config.deepspeed.sharding.gathers_parameters:
        yield from ((batch, True) for batch in mine)
        return
    batch = next(mine, None)
    while world.any(batch is not None):
        if batch is not None:
            yield batch, True
        else:
            yield next(validation_batches(run, source, rank=0, ranks=world.size, split=split)), False
        batch = next(mine, None)


_TARGETS, _COUNTS = 0, 3
"""Index of the number of targets among a source's sums, and how many counts come first."""


def _divide(config: TransformerConfig, sums: list[float]) -> SourceEvaluation:
    targets, sequences, packs = map(round, sums[:_COUNTS])
    counts = StepCounts(packs=packs, sequences=sequences, tokens=0, targets=targets)
    found = {}
    for loss, loss_sum, correct in zip(config.losses, sums[_COUNTS::2], sums[_COUNTS + 1 :: 2], strict=True):
        found[loss.name] = LossEvaluation(
            loss=loss_sum / counts.of(loss.in_evaluation.divided_by),
            accuracy=None if loss.accuracy is None else correct / counts.of(loss.counted_by),
        )
    main = found.pop(config.losses[0].name)
    assert main.accuracy is not None, "the main loss has targets"
    return SourceEvaluation(
        loss=main.loss, accuracy=main.accuracy, others=found, targets=targets, sequences=sequences, packs=packs
    )
