"""The draws of a simulated step, and that its layout is that of training."""

import math
from dataclasses import replace

import numpy as np
import pytest
from simulated_clusters import ARRIVAL, PER_SLOT, cost, histogram_of

from evenpack.data.batches.placement import Placer
from evenpack.data.order.assignment import assign_step
from evenpack.data.order.selection import PackSelection
from evenpack.data.packing import pack
from evenpack.studies.imbalance.cluster import (
    BALANCED_PACKS,
    SCHEMES,
    ClusterOptions,
    Scheme,
    attended_padding,
    pack_kinds,
    sequence_kinds,
)
from evenpack.studies.imbalance.simulation import StepTimes, make_cluster
from evenpack.studies.lengths.reading import published_histogram
from evenpack.visible_pairs import visible_pairs


def test_expected_work_is_drawn_on_average() -> None:
    """The correction by control variates assumes that the means of draws are those of the kinds."""
    histogram = published_histogram("squad_1_1_384")
    packing = pack(histogram, "longest_pack_first", pack_length=384)
    for kinds in (sequence_kinds(histogram, PER_SLOT), pack_kinds(packing, PER_SLOT, max_sequence_length=384)):
        drawn = kinds.draw(np.random.default_rng(0), 400_000)
        assert kinds.probabilities.sum() == pytest.approx(1.0)
        for values in (kinds.tokens, kinds.attended, kinds.sequences):
            expected = kinds.probabilities @ values
            assert values[drawn].mean() == pytest.approx(
                expected, abs=5 * values[drawn].std() / math.sqrt(400_000) + 1e-9
            )
        assert abs(np.corrcoef(kinds.tokens[drawn[:-1]], kinds.tokens[drawn[1:]])[0, 1]) < 0.01
    assert kinds.probabilities @ kinds.tokens == pytest.approx(packing.tokens / packing.packs)
    assert kinds.mean_sequences == pytest.approx(packing.packing_factor)
    assert kinds.probabilities @ kinds.attended * packing.packs == pytest.approx(
        histogram.counts @ np.arange(1, 385) ** 2
    )


def test_kinds_are_drawn_by_their_own_numbers_however_many_there_are() -> None:
    kinds = sequence_kinds(histogram_of(dict.fromkeys(range(1, 70_001), 1)), PER_SLOT)
    drawn = kinds.draw(np.random.default_rng(0), 700_000)
    counts = np.bincount(drawn, minlength=70_000)
    assert counts[:4_000].mean() == pytest.approx(10.0, rel=0.03)
    assert counts[66_000:].mean() == pytest.approx(10.0, rel=0.03)


@pytest.mark.slow
def test_the_corrected_rate_is_that_of_the_steps_themselves() -> None:
    """It agrees with all sequences over all seconds, within the error of the latter, and is more precise."""
    histogram = published_histogram("squad_1_1_384")
    packing = pack(histogram, "longest_pack_first", pack_length=384)
    options = ClusterOptions(batch=8, packs=4, steps=30)
    cluster = make_cluster(histogram, packing, cost=cost(per_squared_length=0.001, causal=False), options=options)
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
    assert attended_padding(np.array([0, 3, 10, 25]), 10, PER_SLOT).tolist() == [0, 9, 100, 225]


def selection(packs: list[list[int]]) -> PackSelection:
    """Returns packs of sequences of these lengths."""
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
    """The comparison is with `Placer`, share by share: slots in one cost model, squared lengths in another."""
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
    attention = {"per_slot": 0.0, "per_squared_length": 1.0}
    windowed = attention | {"window_shares": {6: 0.5}}
    for weights in ({}, attention, windowed, {"per_slot": 0.0, "per_segment": 1.0}):
        cluster = make_cluster(histogram, packing, cost=cost(**weights, causal=causal), options=options)
        found.append(cluster.micro_batch_seconds(scheme, items, shares))
    for share in range(6):
        packs = selection([list(contents[kind]) for kind in items[shares.items_of(share)]])
        placer = Placer(
            shape=replace(shape, items_per_micro_batch=packs.packs),
            pack_length=200,
            max_sequence_length=90,
            is_bidirectional=not causal,
        )
        placed = placer.place(packs, packs.lengths, np.ones_like(packs.lengths), rows=placer.rows)
        segments = np.diff([*placed.segment_starts, placed.slots])
        squares, near = (segments**2).sum(), visible_pairs(segments, window=6, causal=False).sum()
        expected = [placed.slots, squares, (squares + near) / 2, len(packs.lengths)]
        assert [values[share] for values in found] == expected
