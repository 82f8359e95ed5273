"""Simulated clusters in cases that can be computed by hand."""

import itertools
import os
from typing import Any

import pytest
from simulated_clusters import cost, run, some_steps

from evenpack.errors import RunError
from evenpack.studies.imbalance import simulation
from evenpack.studies.imbalance.cluster import BASELINE, SCHEMES, Cluster


def test_sequences_of_one_length_give_exact_speed_ups_and_no_rank_waits() -> None:
    """Two sequences of 64 fill a pack of 128; rows of 64 are as wide as the longest. 8 sequences: 512 slots."""
    found = run({64: 1000}, devices=(1, 4, 16), pack_length=128, batch=8, steps=30, model=cost(constant=10.0))
    assert found.packs_per_micro_batch == 4
    assert len(found.rows) == 3 * len(SCHEMES)
    for row in found.rows:
        assert row.speed_up == row.speed_up_low == row.speed_up_high == 1.0
        assert (row.wait_share, row.slowest_over_mean) == (0.0, 1.0)
        assert row.sequences_per_second == pytest.approx(8 * row.devices / (10.0 + 512), rel=1e-12)


def test_short_sequences_alone_speed_up_by_the_ratio_of_slots() -> None:
    """One sequence in a million has 256 tokens and never comes: rows are 256 wide, sequences 64 long."""
    found = run({64: 10**12, 256: 1}, devices=(8,), batch=4, steps=30)
    speed_up = {(row.layout, row.policy): row.speed_up for row in found.rows}
    assert speed_up[("unpadded", "cost_balanced")] == 256 / 64
    assert speed_up[("unpadded", "arrival")] == 256 / 64
    assert speed_up[("padded", "max_tokens")] == 256 / 64
    assert speed_up[("padded", "sorted")] == 256 / 64
    assert speed_up[("packed", "cost_balanced")] == pytest.approx(4.0, rel=1e-9)


def test_two_lengths_on_two_devices_wait_as_enumerated() -> None:
    """Lengths 64 and 128, alike likely, one each: the slower of two has 64 slots once in four, else 128."""
    (row,) = some_steps({64: 500, 128: 500}, devices=2, batch=1, steps=1500)
    pairs = list(itertools.product((64, 128), repeat=2))
    slowest = sum(max(pair) for pair in pairs) / 4
    mean = sum(sum(pair) / 2 for pair in pairs) / 4
    assert row.speed_up == pytest.approx(128 / slowest, rel=0.015)
    assert row.speed_up_high - row.speed_up_low < 0.03
    assert row.wait_share == pytest.approx(1 - mean / slowest, rel=0.06)
    assert row.slowest_over_mean == pytest.approx(sum(max(p) / (sum(p) / 2) for p in pairs) / 4, rel=0.02)


@pytest.mark.parametrize("devices", [1, 3, 16])
def test_one_sequence_a_device_waits_for_the_order_statistic(devices: int) -> None:
    """E[max of n lengths] = Σ_l (1 - F(l - 1)^n), with slots in steps of 64."""
    counts = {64: 50, 128: 30, 192: 15, 320: 5}
    cdf = {length: sum(n for other, n in counts.items() if other <= length) / 100 for length in [0, *counts]}
    expected = sum((high - low) * (1 - cdf[low] ** devices) for low, high in itertools.pairwise(cdf))
    (row,) = some_steps(counts, devices=devices, batch=1, steps=800)
    margin = 2 * (row.speed_up_high - row.speed_up)
    assert row.speed_up == pytest.approx(320 / expected, abs=max(margin, 1e-9))
    assert margin < 0.12 * row.speed_up


@pytest.mark.slow
def test_the_interval_holds_the_truth_nineteen_times_in_twenty() -> None:
    found = some_steps({64: 500, 128: 500}, devices=2, batch=1, steps=2400, pieces=48)
    held = sum(row.speed_up_low <= 128 / 112 <= row.speed_up_high for row in found)
    assert 40 <= held <= 48  # 95 % of 48, less four standard deviations


def test_padding_by_arrival_is_constant_where_attention_is_causal() -> None:
    model = cost(per_squared_length=0.01)
    found = run({64: 5, 100: 3, 512: 2}, devices=(1, 8), model=model, batch=4, steps=40)
    for row in found.of(BASELINE):
        assert row.speed_up_low == row.speed_up_high == 1.0
        assert row.wait_share == 0.0
        assert row.sequences_per_second == pytest.approx(4 * row.devices / (4 * (512 + 0.01 * 512**2)))
    both_ways = run(
        {64: 5, 100: 3, 512: 2}, devices=(8,), model=cost(per_squared_length=0.01, causal=False), batch=4, steps=40
    )
    row = both_ways.of(BASELINE)[0]
    assert row.wait_share > 0
    assert row.sequences_per_second > found.of(BASELINE)[1].sequences_per_second


def test_a_padded_row_of_a_bidirectional_model_costs_sequence_and_padding_apart() -> None:
    """One length that comes, 100, in rows of 512: 100² + 412²."""
    model = cost(per_slot=0.0, per_squared_length=1.0, causal=False)
    found = run({100: 10**12, 512: 1}, devices=(2,), model=model, batch=3, steps=30)
    assert found.of(BASELINE)[0].sequences_per_second == pytest.approx(3 * 2 / (3 * (100**2 + 412**2)))


@pytest.mark.slow
def test_the_seconds_are_linear_in_the_cost_model() -> None:
    """If all four weights are scaled, all seconds are; speed-ups do not change."""
    weights = {"constant": 3.0, "per_slot": 1.0, "per_squared_length": 0.002, "per_segment": 5.0, "per_step": 7.0}
    setting = {"devices": (1, 8), "batch": 4, "accumulation": 2, "steps": 30}
    counts = {20: 5, 90: 3, 128: 2}
    once = run(counts, model=cost(**weights), **setting)
    thrice = run(counts, model=cost(**{name: 3 * value for name, value in weights.items()}), **setting)
    for row, other in zip(once.rows, thrice.rows, strict=True):
        assert other.speed_up == pytest.approx(row.speed_up, rel=1e-9)
        assert other.sequences_per_second == pytest.approx(row.sequences_per_second / 3, rel=1e-9)


def test_each_term_of_the_cost_model_counts_what_it_says() -> None:
    """Equal lengths of 64 in packs of 160: two in each, 32 slots of padding; 4 sequences or 2 packs, twice a step."""
    parts = {
        "constant": {"packed": 2, "unpadded": 2, "padded": 2},
        "per_slot": {"packed": 2 * 2 * 160, "unpadded": 2 * 4 * 64, "padded": 2 * 4 * 64},
        "per_squared_length": {"packed": 2 * 2 * (2 * 64**2 + 32**2), "unpadded": 8 * 64**2, "padded": 8 * 64**2},
        "per_segment": {"packed": 8, "unpadded": 8, "padded": 8},
        "per_step": {"packed": 1, "unpadded": 1, "padded": 1},
    }
    for term, expected in parts.items():
        model = cost(**{"per_slot": 0.0, term: 1.0})
        found = run({64: 1000}, devices=(1, 4), model=model, pack_length=160, batch=4, accumulation=2, steps=30)
        for row in found.rows:
            seconds = 2 * 2 * 160**2 if row.dense and term == "per_squared_length" else expected[row.layout]
            assert 8 * row.devices / row.sequences_per_second == pytest.approx(seconds), (term, row)


@pytest.mark.slow
def test_zero_two_waits_in_every_micro_batch_and_accumulation_averages_otherwise() -> None:
    counts = {64: 500, 128: 500}
    by_zero = {
        stage: some_steps(counts, devices=2, batch=1, accumulation=2, steps=800, zero_stage=stage)[0]
        for stage in (0, 1, 2, 3)
    }
    sums = [max(a + b, c + d) for a, b, c, d in itertools.product((64, 128), repeat=4)]
    once = 2 * 128 / (sum(sums) / 16)
    assert by_zero[0].speed_up == by_zero[1].speed_up == pytest.approx(once, rel=0.015)
    assert by_zero[2].speed_up == by_zero[3].speed_up == pytest.approx(128 / 112, rel=0.015)
    assert once > 1.03 * 128 / 112


@pytest.mark.slow
def test_processes_pieces_of_work_and_the_other_counts_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {20: 5, 90: 3, 128: 2}
    setting = {"batch": 2, "steps": 40}
    alone = run(counts, devices=(1, 2, 4), **setting)
    monkeypatch.setattr(simulation, "_ITEMS_OF_A_TASK", 20_000)
    assert run(counts, devices=(1, 2, 4), **setting) == alone
    assert run(counts, devices=(1, 2, 4), processes=2, **setting) == alone
    assert run(counts, devices=(4,), **setting).rows == tuple(row for row in alone.rows if row.devices == 4)
    assert run(counts, devices=(4,), **setting, seed=1).rows != run(counts, devices=(4,), **setting).rows


class DyingCluster(Cluster):
    def steps(self, *_: object) -> Any:
        os._exit(9)


@pytest.mark.slow
def test_a_process_that_dies_is_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "Cluster", DyingCluster)
    with pytest.raises(RunError, match="one of 2 processes that simulate has died"):
        run({20: 5, 90: 3, 128: 2}, devices=(1, 2), batch=2, steps=40, processes=2)
