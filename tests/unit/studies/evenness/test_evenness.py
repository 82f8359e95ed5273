"""`study evenness`: the bound holds for every packing, even packs are valid packings, waits are expected maxima."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from command_line import evenpack
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table

from evenpack.config import load_run_file
from evenpack.data.order.step_shape import CostWeights
from evenpack.data.packing import LengthHistogram
from evenpack.engine.config import RunConfig
from evenpack.errors import ConfigError
from evenpack.models.cost import Work, step_flops
from evenpack.studies.evenness.command import EvennessCommand, model_of_run_file
from evenpack.studies.evenness.study import (
    WeighedModel,
    cost_packs,
    even_packs,
    evenness_rows,
    least_spread,
    planned_maximum,
    tolerance_rows,
)
from evenpack.studies.lengths.options import SubjectOptions
from evenpack.studies.lengths.subject import find_subject
from evenpack.studies.statistics.laws import expected_maximum_of_draws

SQUARES = WeighedModel(
    name="squares", weights=CostWeights(per_token=2.0, per_squared_length=1.0, per_segment=0.0), unit_flops=3.0
)


def _partitions(items, packs):
    """Yields every way to put the items into so many packs, as sums of the packs."""
    for places in itertools.product(range(packs), repeat=len(items)):
        yield np.bincount(places, weights=items, minlength=packs)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 3))
def test_no_packing_has_a_smaller_spread_than_the_bound(lengths, packs):
    costs = np.sort(np.array(lengths, dtype=np.float64) ** 2)[::-1]
    bound, alone = least_spread(costs, packs)
    assert len(bound) == packs
    assert bound.sum() == pytest.approx(costs.sum())
    assert (bound[:alone] == costs[:alone]).all()
    for sums in _partitions(costs, packs):
        assert sums.std() >= bound.std() - 1e-9
        for devices in (1, 2, 5):
            assert expected_maximum_of_draws(sums, devices) >= expected_maximum_of_draws(bound, devices) - 1e-9


def test_the_bound_is_reached_where_costs_divide_equally():
    bound, alone = least_spread(np.array([16.0, 4.0, 4.0, 4.0, 4.0]), 3)
    assert (bound.tolist(), alone) == ([16.0, 8.0, 8.0], 1)
    bound, alone = least_spread(np.array([16.0, 9.0, 1.0, 1.0, 1.0]), 3)  # 9 is below the mean of all, not of the rest
    assert (bound.tolist(), alone) == ([16.0, 9.0, 3.0], 2)


@given(st.lists(st.integers(1, 64), min_size=1, max_size=60), st.sampled_from([1 / 2, 1 / 8, 1 / 64]))
def test_even_packs_hold_every_sequence_and_no_more_than_fits(lengths, above):
    """With the length as the cost, the sum of a pack is the slots that it takes."""
    ordered = np.sort(np.array(lengths))[::-1]
    sums = even_packs(ordered, ordered.astype(np.float64), 64, packs=2, above=above)
    assert sums.sum() == sum(lengths)
    assert sums.max() <= 64
    assert len(sums) >= -(-sum(lengths) // 64)


def test_long_sequences_are_spread_over_packs_that_would_fill_without_it():
    """Full packs put the two long sequences together; even ones give each a pack of its own."""
    histogram = LengthHistogram(counts=np.bincount([8, 8] + [1] * 16)[1:])
    found = cost_packs(histogram, SQUARES, pack_length=16)
    assert sorted(found.full - found.of_slots) == [16.0, 128.0]
    assert sorted(found.by_name(2)["even"] - found.of_slots) == [72.0, 72.0]
    assert found.least.tolist() == found.by_name(2)["even"].tolist()
    (full, even, least, planned) = evenness_rows(found, [2], packs_per_device=4)
    assert [row.packs_are for row in (full, even, least, planned)] == ["full", "even", "least", "planned"]
    mean, slowest = 32 + 72, (48 + 3 * 160) / 4  # the cheaper one is the slowest of two in one draw of four
    assert full.waiting == pytest.approx(1 - mean / slowest)
    assert full.most == pytest.approx(160 / mean)
    assert full.pack_flops == pytest.approx(3.0 * mean)
    assert full.waiting_flops == pytest.approx(3.0 * (slowest - mean))
    assert full.attention_share == pytest.approx(72 / mean)
    assert (even.waiting, even.deviation) == (pytest.approx(0.0), pytest.approx(0.0))
    assert even.time == least.time == pytest.approx(mean / slowest)
    assert 0 < planned.waiting < full.waiting / 2


def test_a_plan_leaves_a_wait_only_where_packs_cannot_be_divided_equally():
    costs = np.array([1.0, 3.0])
    assert planned_maximum(costs, 1, packs_per_device=4) == pytest.approx(8.0)
    assert planned_maximum(np.array([2.0]), 4, packs_per_device=3) == 6.0
    drawn_apart = expected_maximum_of_draws(costs, 4)
    assert 2.0 <= planned_maximum(costs, 4, packs_per_device=8) / 8 < 2.3 < drawn_apart


def test_a_window_makes_long_sequences_cheaper():
    local = WeighedModel(
        name="local",
        weights=CostWeights(per_token=2.0, per_squared_length=0.0, per_segment=0.0, per_pair_within={2: 1.0}),
        unit_flops=1.0,
    )
    assert local.attention_costs(np.array([1, 3, 10])).tolist() == [1.0, 9.0, 44.0]  # 10 + 2 * (9 + 8)
    assert SQUARES.attention_costs(np.array([1, 3, 10])).tolist() == [1.0, 9.0, 100.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": "8,none"}, r"--devices 8,none: 'none' .*give 8,64,512"),
        ({"sample": 0}, "--sample must be at least 1, not 0"),
        ({"packs_per_device": 0}, "--packs-per-device must be at least 1, not 0"),
        ({"tolerance": 0.0}, "--tolerance is a share .* above 0 and below 1, not 0.0"),
        ({"tolerance": 5.0}, "--tolerance is a share .* above 0 and below 1, not 5.0"),
        ({"models": "llama_160m"}, r"--models llama_160m: .*give --vocabulary-size"),
        ({"models": "nowhere"}, "nowhere does not exist"),
    ],
)
def test_a_wrong_option_is_named_before_lengths_are_read(options, message):
    with pytest.raises(ConfigError, match=message):
        EvennessCommand(**options).run(lambda: pytest.fail("lengths were read"))


def test_a_vocabulary_has_two_entries_or_more():
    done = evenpack("study", "evenness", "wikipedia_2048", "--vocabulary-size", "0")
    assert (done.code, "--vocabulary-size" in done.stderr) == (2, True)


def test_the_command_reports_models_devices_and_packings(tmp_path):
    np.save(tmp_path / "lengths.npy", np.array([64] * 2 + [33] * 20 + [16] * 40 + [5] * 50))
    options = SubjectOptions(pack_length=64)
    command = EvennessCommand(models="gpt2_xl,bert_large_phase2", devices="2,4", plot=tmp_path / "evenness.png")
    report = command.run(lambda: find_subject(str(tmp_path / "lengths.npy"), [], options))
    rows = report.value["rows"]
    assert len(rows) == 2 * 2 * 4
    assert report.value["sequences_alone"].keys() == {"gpt2_xl", "bert_large_phase2"}
    for full, even, least in zip(rows[::4], rows[1::4], rows[2::4], strict=True):
        assert least.time <= even.time <= full.time == 1.0
        assert least.deviation <= full.deviation
    assert (tmp_path / "evenness.png").stat().st_size > 10_000
    assert not any("random sample" in str(part) for part in report.shown)


def test_operations_are_those_of_the_model():
    """A pack that is one sequence has the operations that the model counts for it."""
    config = load_run_file(Path("gpt2_xl"), RunConfig)
    weighed = model_of_run_file("gpt2_xl", vocabulary_size=None)
    work = Work(slots=1024, squared_lengths=1024**2, head_slots=1024, sequences=0, pairs_within={})
    flops = step_flops(config.model, vocabulary_size=50_257, work=work)
    (full, *_) = evenness_rows(
        cost_packs(LengthHistogram.from_lengths(np.full(4, 1024), longest=1024), weighed, pack_length=1024),
        [2],
        packs_per_device=1,
    )
    assert full.pack_flops == pytest.approx(flops, rel=1e-6)


def test_a_tolerance_is_met_or_missed_by_so_much_and_what_would_do_meets_it():
    histogram = LengthHistogram(counts=np.bincount([16] * 4 + [8] * 8 + [1] * 96)[1:])
    costs = cost_packs(histogram, SQUARES, pack_length=16)
    (full, _, least, _) = evenness_rows(costs, [8], packs_per_device=1)
    assert full.waiting > least.waiting > 0.2

    def row_of(tolerance):
        (row,) = tolerance_rows(costs, [8], tolerance=tolerance)
        return row

    assert row_of(full.waiting).met_by == "full packs"
    assert row_of(full.waiting).fewer_devices == 8
    for tolerance, is_met in ((full.waiting, True), (0.9999 * full.waiting, False)):
        row = row_of(tolerance)
        assert [row.packs_by_arrival == 1, row.packs_planned == 1] == [is_met, is_met], "drawn steps are near it alone"
    assert (row_of(least.waiting).met_by, row_of(least.waiting).missed_by) == ("perhaps another packing", 0.0)
    missed = row_of(0.2)
    assert (missed.met_by, missed.missed_by) == ("no packing", pytest.approx(least.waiting - 0.2))
    on_fewer, on_one_more = (
        evenness_rows(costs, [missed.fewer_devices + more], packs_per_device=1)[0].waiting for more in (0, 1)
    )
    assert on_fewer <= 0.2 < on_one_more
    mean = costs.full.mean()
    for packs, by_cost in ((missed.packs_by_arrival, False), (missed.packs_planned, True)):
        assert 1 - packs * mean / planned_maximum(costs.full, 8, packs_per_device=packs, by_cost=by_cost) <= 0.2
    assert 1 < missed.packs_planned < missed.packs_by_arrival
    assert missed.cut_at is None, "sequences of 16 are not cut at 64"


def test_what_cutting_would_do_is_the_longest_cut_that_does(tmp_path):
    lengths = np.array([512] * 40 + [30] * 2000)
    np.save(tmp_path / "lengths.npy", lengths)
    histogram, model = (
        LengthHistogram.from_lengths(lengths, longest=512),
        model_of_run_file("gpt2_xl", vocabulary_size=None),
    )
    waits = {}
    for cut in (512, 256, 128):
        costs = cost_packs(histogram.fitted(cut, "split").histogram, model, pack_length=512)
        waits[cut] = evenness_rows(costs, [8], packs_per_device=1)[0].waiting
    assert waits[512] > waits[256] > waits[128]
    command = EvennessCommand(models="gpt2_xl", devices="8", tolerance=waits[256])
    report = command.run(lambda: find_subject(str(tmp_path / "lengths.npy"), [], SubjectOptions(pack_length=512)))
    (row,) = report.value["tolerance_rows"]
    assert (row.met_by, row.cut_at) == ("no packing", 256)
    assert any("Waiting of at most" in str(part.title) for part in report.shown if isinstance(part, Table))


def test_a_table_of_a_sample_says_so(tmp_path):
    np.save(tmp_path / "lengths.npy", np.full(40, 5))
    command = EvennessCommand(models="gpt2_xl", devices="2", sample=10)
    report = command.run(lambda: find_subject(str(tmp_path / "lengths.npy"), [], SubjectOptions(pack_length=64)))
    assert any("Packed a random sample, 10 of 40 sequences" in str(part) for part in report.shown)
