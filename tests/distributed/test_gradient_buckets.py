"""The mean over the ranks at ZeRO 0: bucket by bucket, also within the backward pass, and bit for bit DeepSpeed's."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from forked_ranks import run_ranks
from test_normalisation import Setting, make_model, micro_batches, run_config
from torch import Tensor, nn

from evenpack.engine.engine import TrainingEngine
from evenpack.engine.optimizers.norms import gradient_norm_of
from evenpack.engine.sharding.buckets import BucketedReduction, buckets_of
from evenpack.engine.sharding.stages import BUCKET_SIZE
from evenpack.engine.world.distributed import World
from evenpack.models.common.loss_sums import exact_denominators

RANKS = 2
FEW = 2_000
"""Elements of a bucket, so that the tiny model has several."""


Way = tuple[int, bool | None, bool]
"""Accumulation; whether buckets overlap the backward pass (None: DeepSpeed's mean); whether a gradient is missing."""


@dataclass(frozen=True)
class Reduced:
    """One rank's gradients after the mean, flattened; the norm before it; and what happened in which order."""

    gradients: Tensor
    own_norm: float
    events: tuple[str, ...]


def reduced(world: World, accumulation: int, overlaps: bool | None, unused: bool) -> Reduced:
    """Computes the gradients of a step; without `overlaps` DeepSpeed averages them when all are there.

    unused: rank 1 alone computes no gradient of the position embedding.
    """
    config = run_config(Setting(accumulation=accumulation), ranks=world.size)
    engine = TrainingEngine(make_model(), config, world, denominators=partial(exact_denominators, config.model.losses))
    events: list[str] = []
    if overlaps is not None:
        engine.reduction = BucketedReduction(
            engine.deepspeed, engine.model, bucket_size=FEW, device=world.device, overlaps=overlaps
        )
        reduce = engine.deepspeed.buffered_allreduce_fallback

        def note_and_reduce(**named: Any) -> None:
            events.append("bucket")
            reduce(**named)

        engine.deepspeed.buffered_allreduce_fallback = note_and_reduce
    engine.observer = events.append
    if unused and world.rank == 1:
        positions: Any = engine.model.get_submodule("positions")
        forward = positions.forward
        positions.forward = lambda *arguments: forward(*arguments).detach()
    engine.compute_gradients(0, micro_batches(rank=world.rank, ranks=world.size, accumulation=accumulation))
    own_norm = gradient_norm_of(engine.model)  # after the first bucket no longer the rank's own
    if overlaps is None:
        engine.deepspeed.allreduce_gradients()
    else:
        finished = engine.reduction.finish()
        assert finished is not None
        own_norm = finished
    gradients = torch.cat([one.grad.flatten() for one in engine.model.parameters() if one.grad is not None])
    engine.deepspeed.destroy()
    return Reduced(gradients, float(own_norm), tuple(events))


def reduce_in_each_way(world: World) -> dict[Way, Reduced]:
    ways = [(accumulation, overlaps, False) for accumulation in (1, 2) for overlaps in (None, False, True)]
    ways += [(1, None, True), (1, True, True)]
    return {way: reduced(world, *way) for way in ways}


@pytest.fixture(scope="module")
def in_each_way() -> list[dict[Way, Reduced]]:
    return run_ranks(reduce_in_each_way, RANKS)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("overlaps", [False, True])
def test_buckets_have_the_mean_of_deepspeed_bit_for_bit(
    in_each_way: list[dict[Way, Reduced]], accumulation: int, overlaps: bool
) -> None:
    for of_rank in in_each_way:
        ours, theirs = of_rank[accumulation, overlaps, False], of_rank[accumulation, None, False]
        assert torch.equal(ours.gradients, theirs.gradients)
        assert ours.own_norm == pytest.approx(theirs.own_norm, rel=1e-6)
    first, second = (of_rank[accumulation, overlaps, False].own_norm for of_rank in in_each_way)
    assert abs(first - second) > 0.01 * first, "each rank has a part of its own"


def test_buckets_are_reduced_within_the_last_backward_pass_alone(in_each_way: list[dict[Way, Reduced]]) -> None:
    buckets = len(buckets_of(make_model().parameters(), FEW))
    assert buckets > 3
    for of_rank in in_each_way:
        passes = ("begin", "forward", "backward", "forward")
        assert of_rank[2, True, False].events == (*passes, *["bucket"] * buckets, "backward")
        assert of_rank[2, False, False].events == (*passes, "backward", *["bucket"] * buckets)


def norms_of_one_rank(world: World) -> tuple[float, float, float]:
    """Returns the norm of the rank's own gradients, that before clipping, and the expected one."""
    config = run_config(Setting(accumulation=2), ranks=1)
    engine = TrainingEngine(make_model(), config, world, denominators=partial(exact_denominators, config.model.losses))
    engine.compute_gradients(0, micro_batches(rank=0, ranks=1, accumulation=2))
    expected = gradient_norm_of(engine.model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("evenpack.engine.optimizers.norms.gradient_norm_of", pytest.fail)
        own = engine.reduction.finish()
        clipped = engine.sharding.update(engine.deepspeed, 1.0, norm=own, leaves_out=False)
    engine.deepspeed.destroy()
    assert own is not None
    return float(own), float(clipped), float(expected)


def test_one_rank_computes_the_norm_once() -> None:
    ((own, clipped, expected),) = run_ranks(norms_of_one_rank, 1)
    assert own == clipped == pytest.approx(expected, rel=1e-6)


def test_a_parameter_without_a_gradient_holds_up_no_other_and_has_a_mean_as_well(
    in_each_way: list[dict[Way, Reduced]],
) -> None:
    expected = in_each_way[0][1, None, True].gradients
    for of_rank in in_each_way:
        assert torch.equal(of_rank[1, None, True].gradients, expected)
        assert torch.equal(of_rank[1, True, True].gradients, expected)


def test_buckets_hold_every_trained_parameter_once_in_reverse_order() -> None:
    sizes = (5, 3, 1, 20, 6, 2, 7)
    parameters = [nn.Parameter(torch.zeros(size)) for size in (*sizes, 0)]
    parameters[2].requires_grad_(False)
    found = [[one.numel() for one in bucket] for bucket in buckets_of(parameters, 8)]
    assert found == [[7, 2], [6], [20], [3, 5]]
    assert buckets_of([], BUCKET_SIZE) == []
