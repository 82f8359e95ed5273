"""Reductions of dataclasses; two ranks reduce in tests/distributed/test_train.py."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from evenpack.engine.reporting.definitions import find_metric
from evenpack.engine.reporting.step_totals import RankMaxima, RankSums, RankValue, StepTotals, reduce_over_ranks
from evenpack.engine.world.distributed import World
from evenpack.losses import StepCounts

ALONE = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))


@dataclass(frozen=True)
class Values:
    seconds: float
    tokens: int
    norm: RankValue
    of_sources: tuple[int, ...] = ()
    of_losses: Mapping[str, RankValue] | None = None
    inner: "Values | None" = None


def test_values_keep_their_places_and_whole_numbers_stay_whole() -> None:
    sums = Values(0.5, 3, torch.tensor(2.5), (7, 8), {"one": torch.tensor(4), "two": 0.25}, Values(1.5, 9, 10))
    reduced, greatest = reduce_over_ranks(ALONE, sums, Values(6.0, 11, torch.tensor(12)))
    assert reduced == Values(0.5, 3, 2.5, (7, 8), {"one": 4, "two": 0.25}, Values(1.5, 9, 10))
    assert greatest == Values(6.0, 11, 12)
    assert reduced.of_losses is not None
    assert {name for name, value in reduced.of_losses.items() if isinstance(value, int)} == {"one"}
    assert isinstance(reduced.tokens, int)
    assert isinstance(greatest.norm, int)


def test_metrics_are_reduced_as_their_definitions_say() -> None:
    """Of three ranks that add up to 3, where the greatest value is 7."""
    counts = StepCounts(packs=3, sequences=3, tokens=3, targets=3)
    numbers = ("stop", "slots", "host_to_device_bytes", "squared_lengths", "gradient_norm")
    seconds = {"compute_seconds": 3.0, "loader_seconds": 3.0}
    nothing = {"pairs_within": {}, "loss_sums": {}, "optimised_losses": {}, "correct": {}, "waits": None}
    several = {"source_tokens": (), "order_hash": ()}
    sums = RankSums(counts=counts, **dict.fromkeys(numbers, 3), **seconds, **nothing, **several)
    maxima = RankMaxima(segment_room=7, compute_seconds=7.0, left_eager=7, waits=None)
    found = StepTotals(losses={}, sums=sums, maxima=maxima, ranks=3).metrics
    expected = {"sum": 3, "same": 3, "mean": 1, "max": 7}
    assert found == {name: expected[find_metric((name,)).over_ranks] for name in found}
