"""Simulated clusters: cases that can be worked out by hand, and the study's claims at fewer steps."""

import dataclasses
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evenpack.data.batches.placement import Placer
from evenpack.data.order.assignment import assign_step
from evenpack.data.order.step_plan import PackSelection
from evenpack.data.order.step_shape import POLICIES
from evenpack.data.packing import LengthHistogram, pack
from evenpack.errors import ConfigError
from evenpack.models.bert.config import BertConfig
from evenpack.models.cost import Work, step_flops
from evenpack.models.gpt2.config import Gpt2Config
from evenpack.studies.imbalance import simulation
from evenpack.studies.imbalance.cluster import (
    BALANCED_PACKS,
    BASELINE,
    DENSE_PACKS,
    SCHEMES,
    ClusterOptions,
    Scheme,
)
from evenpack.studies.imbalance.drawing import pack_kinds, sequence_kinds, squared_padding
from evenpack.studies.imbalance.simulation import Simulation, make_cluster, parse_devices, simulate
from evenpack.studies.imbalance.step_cost import SHIPPED, StepCost, find_cost, shipped_costs
from evenpack.studies.imbalance.step_times import SimulationRow, StepTimes, summarise
from evenpack.studies.lengths.published import published_histogram

ARRIVAL = Scheme(layout="unpadded", policy="arrival")
PER_SLOT = StepCost(
    name="slots",
    origin="a test",
    estimated=True,
    causal=True,
    constant=0.0,
    per_slot=1.0,
    per_squared_length=0.0,
    per_segment=0.0,
    per_step=0.0,
    noise=0.0,
)


def cost(**changes: float | bool) -> StepCost:
    return dataclasses.replace(PER_SLOT, **changes)


def histogram_of(counts: dict[int, int]) -> LengthHistogram:
    return LengthHistogram(counts=np.array([counts.get(length, 0) for length in range(1, max(counts) + 1)]))


def run(
    counts: dict[int, int],
    *,
    devices: tuple[int, ...],
    model: StepCost = PER_SLOT,
    pack_length: int | None = None,
    processes: int = 1,
    causal: bool | None = None,
    **options: float | bool | None,
) -> Simulation:
    """Of so many sequences of each length."""
    histogram = histogram_of(counts)
    return simulate(
        histogram,
        pack(histogram, "longest_pack_first", pack_length=pack_length or histogram.longest),
        devices=devices,
        cost=model,
        options=ClusterOptions(**options),
        causal=causal,
        processes=processes,
    )


def some_steps(
    counts: dict[int, int],
    *,
    devices: int,
    steps: int,
    model: StepCost = PER_SLOT,
    scheme: Scheme = ARRIVAL,
    pieces: int = 1,
    **options: float | bool | None,
) -> list[SimulationRow]:
    """One scheme on one number of devices, which costs a tenth; a row for each of `pieces`."""
    histogram = histogram_of(counts)
    packing = pack(histogram, "longest_pack_first", pack_length=histogram.longest)
    cluster = make_cluster(histogram, packing, cost=model, options=ClusterOptions(**options))
    both = [cluster.steps(devices, 0, steps, (one,))[0] for one in (BASELINE, scheme)]
    rows = []
    for piece in range(pieces):
        times = {
            (one, devices): StepTimes.of_columns(
                columns[piece::pieces], cluster.kinds(one.batching), items=cluster.items_per_step(one.batching, devices)
            )
            for one, columns in zip((BASELINE, scheme), both, strict=True)
        }
        alone = {(one, 1): of_one for (one, _), of_one in times.items()}
        times = alone | times
        rows.append(summarise(scheme, times)[-1])
    return rows


def test_sequences_of_one_length_give_exact_speed_ups_and_nobody_waits() -> None:
    """Two sequences of 64 fill a pack of 128; rows of 64 are as wide as the longest. 8 sequences: 512 slots."""
    found = run({64: 1000}, devices=(1, 4, 16), pack_length=128, batch=8, steps=30, model=cost(constant=10.0))
    assert found.packs_per_micro_batch == 4
    assert len(found.rows) == 3 * len(SCHEMES)
    for row in found.rows:
        assert row.speed_up == row.speed_up_low == row.speed_up_high == row.step_low == row.step_high == 1.0
        assert (row.wait_share, row.slowest_over_mean, row.worst_slowest_over_mean) == (0.0, 1.0, 1.0)
        assert row.efficiency == pytest.approx(1.0, rel=1e-12)
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
    assert row.wait_share == pytest.approx(1 - mean / slowest, rel=0.12)
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


def test_the_interval_holds_the_truth_nineteen_times_in_twenty() -> None:
    found = some_steps({64: 500, 128: 500}, devices=2, batch=1, steps=2400, pieces=48)
    held = sum(row.speed_up_low <= 128 / 112 <= row.speed_up_high for row in found)
    assert 40 <= held <= 48  # 95 % of 48, less four standard deviations


def test_padding_by_arrival_is_constant_where_attention_is_causal() -> None:
    model = cost(per_squared_length=0.01)
    found = run({64: 5, 100: 3, 512: 2}, devices=(1, 8), model=model, batch=4, steps=40)
    for row in found.of(BASELINE):
        assert row.step_low == row.step_high == 1.0
        assert row.wait_share == 0.0
        assert row.sequences_per_second == pytest.approx(4 * row.devices / (4 * (512 + 0.01 * 512**2)))
    both_ways = run({64: 5, 100: 3, 512: 2}, devices=(8,), model=model, batch=4, steps=40, causal=False)
    row = both_ways.of(BASELINE)[0]
    assert row.wait_share > 0
    assert row.sequences_per_second > found.of(BASELINE)[1].sequences_per_second


def test_a_padded_row_costs_its_sequence_and_its_padding_apart_where_the_model_looks_both_ways() -> None:
    """One length that comes, 100, in rows of 512: 100² + 412²."""
    found = run({100: 10**12, 512: 1}, devices=(2,), model=cost(per_slot=0.0, per_squared_length=1.0), causal=False,
                batch=3, steps=30)  # fmt: skip
    assert found.of(BASELINE)[0].sequences_per_second == pytest.approx(3 * 2 / (3 * (100**2 + 412**2)))


def test_the_seconds_are_linear_in_the_cost_model() -> None:
    """With all four weights scaled, all seconds are; speed-ups stay."""
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


def test_the_ring_adds_its_seconds_to_every_step() -> None:
    setting = {"devices": (1, 2, 8), "batch": 2, "steps": 30}
    without = run({64: 10}, **setting)
    reduced = run({64: 10}, all_reduce_bytes=1000.0, bandwidth=50.0, **setting)
    for row, other in zip(without.rows, reduced.rows, strict=True):
        seconds = 2 * row.devices / row.sequences_per_second + 2 * 1000 * (row.devices - 1) / row.devices / 50
        assert 2 * row.devices / other.sequences_per_second == pytest.approx(seconds)
        assert other.efficiency == pytest.approx(128 / seconds)
        assert other.wait_share == 0.0


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


def test_noise_makes_even_equal_work_wait() -> None:
    setting = {"devices": 4, "batch": 2, "steps": 800, "model": cost(noise=0.1), "scheme": BALANCED_PACKS}
    (quiet,), (noisy,) = some_steps({64: 10}, **setting), some_steps({64: 10}, noise=True, **setting)
    assert quiet.wait_share == 0.0
    expected = 1 + 0.1 * 1.0294  # mean maximum of four standard normal draws
    assert noisy.slowest_over_mean == pytest.approx(expected, rel=0.01)
    assert quiet.sequences_per_second / noisy.sequences_per_second == pytest.approx(expected, rel=0.01)


def test_processes_pieces_of_work_and_the_other_counts_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {20: 5, 90: 3, 128: 2}
    setting = {"batch": 2, "steps": 40}
    alone = run(counts, devices=(1, 2, 4), **setting)
    monkeypatch.setattr(simulation, "_ITEMS_OF_A_TASK", 20_000)
    assert run(counts, devices=(1, 2, 4), **setting) == alone
    assert run(counts, devices=(1, 2, 4), processes=2, **setting) == alone
    assert run(counts, devices=(4,), **setting).rows == tuple(row for row in alone.rows if row.devices == 4)
    assert run(counts, devices=(4,), **setting, seed=1).rows != run(counts, devices=(4,), **setting).rows


def test_expected_work_is_drawn_on_average() -> None:
    """What the correction by control variates leans on: the means of draws are those of the kinds."""
    histogram = published_histogram("squad_1_1_384")
    packing = pack(histogram, "longest_pack_first", pack_length=384)
    for kinds in (sequence_kinds(histogram), pack_kinds(packing, max_sequence_length=384)):
        drawn = kinds.draw(np.random.default_rng(0), 400_000)
        assert kinds.probabilities.sum() == pytest.approx(1.0)
        for values in (kinds.tokens, kinds.squared_lengths, kinds.sequences):
            expected = kinds.probabilities @ values
            assert values[drawn].mean() == pytest.approx(
                expected, abs=5 * values[drawn].std() / math.sqrt(400_000) + 1e-9
            )
        assert abs(np.corrcoef(kinds.tokens[drawn[:-1]], kinds.tokens[drawn[1:]])[0, 1]) < 0.01
    assert kinds.probabilities @ kinds.tokens == pytest.approx(packing.tokens / packing.packs)
    assert kinds.mean_sequences == pytest.approx(packing.packing_factor)
    assert kinds.probabilities @ kinds.squared_lengths * packing.packs == pytest.approx(
        histogram.counts @ np.arange(1, 385) ** 2
    )


def test_the_corrected_rate_is_that_of_the_steps_themselves() -> None:
    """It agrees with all sequences over all seconds, within the error of the latter, and is surer."""
    histogram = published_histogram("squad_1_1_384")
    packing = pack(histogram, "longest_pack_first", pack_length=384)
    options = ClusterOptions(batch=8, packs=4, steps=30)
    cluster = make_cluster(histogram, packing, cost=cost(per_squared_length=0.001), options=options, causal=False)
    columns = cluster.steps(4, 0, 300)
    for index, scheme in enumerate(SCHEMES):
        items = cluster.items_per_step(scheme.batching, 4)
        times = StepTimes.of_columns(columns[index], cluster.kinds(scheme.batching), items=items)
        error = times.step.std() / times.step.mean() / math.sqrt(300)
        sequences = items * (packing.packing_factor if scheme.layout == "packed" else 1)
        assert times.rate == pytest.approx(sequences / times.step.mean(), rel=4 * error + 1e-12)
        assert times.as_expected.std() <= times.step.std() * (1 + 1e-9)
        if scheme in (ARRIVAL, BALANCED_PACKS):
            assert times.as_expected.std() < 0.9 * times.step.std()


def test_padding_of_a_pack_is_cut_into_segments_no_longer_than_a_sequence() -> None:
    assert squared_padding(np.array([0, 3, 10, 25]), 10).tolist() == [0, 9, 100, 225]


@pytest.fixture(scope="module")
def wikipedia() -> Simulation:
    """The study's own setting at fewer steps."""
    histogram = published_histogram("wikipedia_512")
    return simulate(
        histogram,
        pack(histogram, pack_length=512),
        devices=(1, 2, 8, 64, 512),
        cost=find_cost("bert_large_estimate"),
        options=ClusterOptions(steps=30),
        processes=1,
    )


def test_un_padding_by_arrival_beats_masked_packs_on_one_device_and_loses_from_two_on(wikipedia: Simulation) -> None:
    """PackedBERT's packs compute whole squares: it says the same (section 4.4)."""
    crossing = next(one for one in wikipedia.crossings if one.policy == "arrival" and one.against == DENSE_PACKS.label)
    assert crossing.verdict == "falls behind"
    assert 1 < crossing.low <= crossing.devices <= crossing.high < 2
    speed_ups = {row.devices: row.speed_up for row in wikipedia.of(ARRIVAL)}
    assert speed_ups[1] > wikipedia.of(DENSE_PACKS)[0].speed_up_high
    assert 1.9 < speed_ups[1] < 2.1
    assert list(speed_ups.values()) == sorted(speed_ups.values(), reverse=True)
    assert speed_ups[512] < 1.5


def test_better_assignment_keeps_un_padding_fast(wikipedia: Simulation) -> None:
    last = {(row.layout, row.policy): row for row in wikipedia.rows if row.devices == 512 and not row.dense}
    assigned = [last["unpadded", policy].speed_up for policy in POLICIES["sequences", "unpadded"]]
    arrival, serpentine, balanced, max_tokens = assigned
    assert arrival < max_tokens < serpentine
    assert serpentine == pytest.approx(balanced, rel=0.01)
    assert last["packed", "cost_balanced"].speed_up == pytest.approx(balanced, rel=0.01)
    assert last["padded", "sorted"].wait_share > 0.5
    assert arrival < last["padded", "max_tokens"].speed_up < serpentine


@pytest.mark.parametrize(("packs", "allowed"), [(8, 1.01), (2, 1.02)])
def test_balanced_packs_hardly_wait_up_to_two_thousand_devices(packs: int, allowed: float) -> None:
    histogram = published_histogram("wikipedia_512")
    found = simulate(
        histogram,
        pack(histogram, pack_length=512),
        devices=(2048,),
        cost=find_cost("bert_large_estimate"),
        options=ClusterOptions(steps=30, packs=packs, batch=2 * packs),
        processes=1,
    )
    balanced = found.of(BALANCED_PACKS)[0].slowest_over_mean
    assert balanced <= allowed
    assert found.of(Scheme(layout="packed", policy="arrival"))[0].slowest_over_mean > balanced


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("1..2048", [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048]),
        ("3..20", [3, 4, 8, 16, 20]),
        ("8, 1,24,8", [1, 8, 24]),
        ("5..5", [5]),
        ("1..4,100", [1, 2, 4, 100]),
    ],
)
def test_devices_are_a_range_of_powers_of_two_or_a_list(given: str, expected: list[int]) -> None:
    assert list(parse_devices(given)) == expected


@pytest.mark.parametrize("given", ["0", "-1", "1..", "..8", "1.5", "", "a", "1,,2", "²", "1e3", "1...4"])
def test_devices_that_are_no_positive_integers_are_refused(given: str) -> None:
    with pytest.raises(ConfigError, match=r"is no positive integer; give 1\.\.2048"):
        parse_devices(given)


def test_ranges_that_run_backwards_and_clusters_beyond_reason_are_refused() -> None:
    with pytest.raises(ConfigError, match="runs backwards"):
        parse_devices("8..2")
    with pytest.raises(ConfigError, match=r"up to 131,072 devices"):
        parse_devices("1..1000000000")


@pytest.mark.parametrize("options", [{"batch": 1 << 21}, {"batch": 1, "packs": 1 << 21}, {"accumulation": 1 << 16}])
def test_a_step_that_no_memory_would_hold_is_refused(options: dict[str, int]) -> None:
    histogram = published_histogram("squad_1_1_384")
    packing = pack(histogram, pack_length=384)
    with pytest.raises(ConfigError, match=r"a step of 4 devices would assign 8,388,608 sequences or packs"):
        simulate(
            histogram,
            packing,
            devices=[1, 4],
            cost=find_cost("bert_large_estimate"),
            options=ClusterOptions(**{"batch": 32, **options}),
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "--batch must be 1 or more, not 0"),
        ({"packs": 0}, "--packs must be 1"),
        ({"accumulation": -1}, "--accumulation"),
        ({"steps": 29}, "--steps must be 30 or more, not 29"),
        ({"seed": -1}, "--seed"),
        ({"zero_stage": 4}, "--zero-stage is 0, 1, 2 or 3"),
        ({"all_reduce_bytes": -1.0, "bandwidth": 1.0}, "--all-reduce-bytes"),
        ({"all_reduce_bytes": math.inf, "bandwidth": 1.0}, "--all-reduce-bytes"),
        ({"all_reduce_bytes": 1.0, "bandwidth": 0.0}, "--bandwidth must be above 0"),
        ({"all_reduce_bytes": 1.0}, "go together"),
        ({"bandwidth": 1.0}, "go together"),
    ],
)
def test_options_out_of_range_are_refused_by_name(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ClusterOptions(**options)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("bert_large_estimate", BertConfig(kind="bert", preset="large")),
        ("gpt2_xl_estimate", Gpt2Config(kind="gpt2", preset="xl")),
    ],
)
def test_estimates_are_the_models_own_operations(name: str, config: BertConfig | Gpt2Config) -> None:
    def flops(slots: int, squared_lengths: int) -> int:
        work = Work(slots=slots, squared_lengths=squared_lengths, head_slots=0, sequences=0)
        return step_flops(config, vocabulary_size=1, work=work)

    values = json.loads((SHIPPED / f"{name}.json").read_text())
    assert values["flops_per_slot"] == flops(2, 0) / 2
    assert values["flops_per_squared_length"] == flops(0, 2) / 2
    found = find_cost(name)
    assert found.causal == (config.kind == "gpt2")
    assert found.estimated
    assert found.origin.startswith("ESTIMATE, not measured")
    assert found.per_slot == pytest.approx(flops(1000, 0) / 1000 / (989.4e12 * 0.5), rel=1e-4)


def test_every_shipped_cost_model_can_be_read() -> None:
    assert {"bert_large_estimate", "gpt2_xl_estimate"} <= set(shipped_costs())
    for name in shipped_costs():
        assert find_cost(name).per_slot > 0


def test_a_cost_model_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"neither a file nor one that comes with evenpack; .*bert_large_estimate"):
        find_cost("bert_large")
    path = tmp_path / "cost.json"
    for text, message in (
        ("{", "is no JSON"),
        ("[1]", "must hold a JSON object"),
        ('{"model": "x"}', "flops_per_slot"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            find_cost(str(path))


def test_a_measured_cost_model_by_which_nothing_takes_time_is_refused(tmp_path: Path) -> None:
    values = json.loads((SHIPPED / "bert_large_width_cpu.json").read_text())
    terms = ("constant", "per_token", "per_squared_length", "per_segment")
    path = tmp_path / "cost.json"
    path.write_text(json.dumps(values | dict.fromkeys(terms, 0.0)))
    with pytest.raises(ConfigError, match=r"cost\.json: constant, per_token, .* are all 0"):
        find_cost(str(path))
    for term in terms:
        path.write_text(json.dumps(values | dict.fromkeys(terms, 0.0) | {term: 1e-6}))
        assert find_cost(str(path)).name == "cost"


def selection(packs: list[list[int]]) -> PackSelection:
    """Packs of sequences of these lengths."""
    sizes = [len(pack) for pack in packs]
    ids = np.arange(sum(sizes))
    return PackSelection(
        sources=np.zeros(len(packs), dtype=np.int64),
        stream_positions=np.arange(len(packs)),
        offsets=np.cumsum([0, *sizes]),
        sequence_ids=ids,
        lengths=np.array([length for pack in packs for length in pack]),
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scheme", [one for one in SCHEMES if not one.dense], ids=lambda one: one.label)
def test_micro_batches_hold_the_slots_and_segments_that_training_would_lay_out(scheme: Scheme, causal: bool) -> None:
    """Against `Placer`, share by share: slots in one cost model, squared lengths in another."""
    histogram = histogram_of({3: 4, 17: 9, 30: 3, 61: 2, 90: 1})
    packing = pack(histogram, "longest_pack_first", pack_length=200)
    options = ClusterOptions(batch=5, packs=3, accumulation=2)
    generator = np.random.default_rng(3)
    kinds = make_cluster(histogram, packing, cost=PER_SLOT, options=options).kinds(scheme.batching)
    items = generator.choice(len(kinds.tokens), size=3 * 2 * (3 if scheme.layout == "packed" else 5))
    contents = packing.strategies if scheme.layout == "packed" else [(int(length),) for length in kinds.tokens]
    shape = make_cluster(histogram, packing, cost=PER_SLOT, options=options).shape(scheme, 3)
    shares = assign_step(shape, kinds.tokens[items], kinds.tokens[items].astype(np.float64), ranks=3)
    found = []
    for weights in ({}, {"per_slot": 0.0, "per_squared_length": 1.0}, {"per_slot": 0.0, "per_segment": 1.0}):
        cluster = make_cluster(histogram, packing, cost=cost(**weights), options=options, causal=causal)
        found.append(cluster.micro_batch_seconds(scheme, items, shares))
    for share in range(6):
        packs = selection([list(contents[kind]) for kind in items[shares.share(share)]])
        placer = Placer(
            shape=replace(shape, items_per_micro_batch=packs.packs),
            pack_length=200,
            max_sequence_length=90,
            looks_both_ways=not causal,
        )
        placed = placer.place(packs, packs.lengths, np.ones_like(packs.lengths))
        segments = np.diff([*placed.segment_starts, placed.slots])
        assert [values[share] for values in found] == [placed.slots, (segments**2).sum(), len(packs.lengths)]


@pytest.mark.parametrize(("model", "causal"), [("bert large", False), ("another decoder", True)])
def test_a_measured_cost_model_brings_its_weights_its_origin_and_the_kind_of_attention(
    model: str, causal: bool, tmp_path: Path
) -> None:
    values: dict[str, Any] = {
        "constant": 0.5,
        "per_token": 0.25,
        "per_squared_length": 0.125,
        "per_segment": 2.0,
        "per_step": 3.0,
        "noise": 0.1,
        "repeat_noise": None,
        "held_out_median_error": 0.02,
        "held_out_95_percent_error": 0.05,
        "samples": 40,
        "measured_on": {
            "device": "a device",
            "family": model.split(maxsplit=1)[0],
            "model": model,
            "causal": causal,
            "layers": 2,
            "hidden_size": 64,
            "vocabulary_size": 100,
            "rows_per_micro_batch": 4,
            "layouts": ["packed"],
            "precision": "fp32",
            "attention": "auto",
            "evenpack": "0",
            "torch": "2",
            "commit": None,
            "date": "2026-01-02T03:04:05",
        },
    }
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(values))
    found = find_cost(str(path))
    assert (found.name, found.estimated, found.causal) == ("mine", False, causal)
    for word in ("measured: " + model, "2 layers, width 64, 4 rows a micro-batch", "a device, 2026-01-02", "2.0 %"):
        assert word in found.origin
    one, two = np.array([1]), np.array([2])
    assert found.seconds(10 * one, 100 * one, two).tolist() == [0.5 + 2.5 + 12.5 + 4.0]
    assert (found.per_step, found.noise) == (3.0, 0.1)
