"""Reductions by name; two ranks reduce in tests/distributed/test_train.py."""

import pytest
import torch

from evenpack.engine.reporting.step_totals import reduce_over_ranks, reduction_of
from evenpack.engine.world.distributed import World

ALONE = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))


def test_names_keep_their_values_in_any_order_and_whole_numbers_stay_whole() -> None:
    values = {
        "compute_seconds_max": 0.5,
        "tokens": 3,
        "gradient_norm": torch.tensor(2.5),
        "_correct": torch.tensor(4),
        "loader_seconds": 0.25,
    }
    reduced = reduce_over_ranks(ALONE, values)
    assert reduced == {
        "compute_seconds_max": 0.5,
        "tokens": 3,
        "gradient_norm": 2.5,
        "_correct": 4,
        "loader_seconds": 0.25,
    }
    assert list(reduced) == list(values)
    assert {name for name, value in reduced.items() if isinstance(value, int)} == {"tokens", "_correct"}


def test_a_value_that_is_measured_needs_a_definition_with_a_reduction() -> None:
    assert reduction_of("tokens") == "sum"
    assert reduction_of("compute_seconds_max") == reduction_of("_arrival_max") == "max"
    assert reduction_of("_arrival") == "sum"
    with pytest.raises(ValueError, match="'packs_in_flight' is not a metric"):
        reduce_over_ranks(ALONE, {"packs_in_flight": 1})
    with pytest.raises(ValueError, match="'mfu' is computed from other metrics: give it a reduction"):
        reduce_over_ranks(ALONE, {"mfu": 0.4})
