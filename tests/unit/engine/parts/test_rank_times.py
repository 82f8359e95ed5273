"""A rank accumulates times and work until they are gathered."""

from dataclasses import replace

import pytest
from batches import build_batch, random_sequences
from loop_steps import ALONE

from evenpack.batch import PackedBatch
from evenpack.engine.parts.rank_times import RankTimes
from evenpack.engine.reporting.definitions import wrong_value


def batch(*lengths: int) -> PackedBatch:
    packs = [random_sequences(lengths, vocabulary_size=9)]
    return build_batch(packs, "padded", max_sequence_length=8)[0]


def test_sums_are_over_all_micro_batches_of_all_steps_since_the_last_telling() -> None:
    times = RankTimes(ALONE, every_steps=1)
    times.add([batch(3, 5), batch(8)], 1.0)
    times.add([batch(2), batch(1, 1, 1)], 3.0)
    assert times.gather() == {
        "steps": 2,
        "compute_seconds": [4.0],
        "compute_seconds_max": [3.0],
        "compute_seconds_deviation": [1.0],
        "sequences": [7],
        "tokens": [21],
        "slots": [56],
        "squared_lengths": [9 + 25 + 64 + 4 + 3],
    }
    times.add([replace(batch(4), squared_lengths=16, pairs_within={1: 10, 3: 16})] * 2, 0.25)
    again = times.gather()
    assert (again["steps"], again["compute_seconds"], again["tokens"]) == (1, [0.25], [8])
    assert again["pairs_within"] == {"1": [20], "3": [32]}
    assert wrong_value({"ranks": again}) is None
    assert again["compute_seconds_deviation"] == pytest.approx([0.0])
