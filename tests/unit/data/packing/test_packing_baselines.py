"""The baselines of packing agree with their naive definitions, the limits and the published figures."""

from collections import Counter
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packings import packing_of
from repository import PUBLISHED_HISTOGRAMS

from evenpack.data.mapped_pages import memory_bytes
from evenpack.data.packing import LengthHistogram, Packing, baselines, pack
from evenpack.data.packing.baselines import (
    first_fit_decreasing,
    next_fit,
    next_fit_ends,
    sample_histogram,
    sorted_batches,
)
from evenpack.errors import PackingError


def published(name: str) -> LengthHistogram:
    return LengthHistogram(counts=np.array(PUBLISHED_HISTOGRAMS[name]))


def histogram_of(lengths: list[int]) -> LengthHistogram:
    return LengthHistogram.from_lengths(lengths, longest=max(lengths))


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], int, int]:
    """Draws lengths in arrival order, a pack length, and a limit on depth."""
    pack_length = draw(st.integers(4, 24))
    lengths = draw(st.lists(st.integers(1, draw(st.integers(1, pack_length))), min_size=1, max_size=120))
    return lengths, pack_length, draw(st.integers(1, pack_length))


def naive_next_fit(lengths: list[int], pack_length: int, limit: int, separators: int) -> list[list[int]]:
    packs: list[list[int]] = []
    for length in lengths:
        if packs and len(packs[-1]) < limit:
            current = packs[-1]
            if sum(current) + separators * len(current) + length <= pack_length:
                current.append(length)
                continue
        packs.append([length])
    return packs


def naive_first_fit_decreasing(lengths: list[int], pack_length: int, limit: int) -> list[list[int]]:
    packs: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        fitting = (pack for pack in packs if sum(pack) + length <= pack_length and len(pack) < limit)
        pack = next(fitting, None)
        if pack is None:
            packs.append([length])
        else:
            pack.append(length)
    return packs


def strategies_of(packs: list[list[int]]) -> Counter[tuple[int, ...]]:
    return Counter(tuple(sorted(pack, reverse=True)) for pack in packs)


def checked(used: Mapping[tuple[int, ...], int], lengths: list[int], pack_length: int) -> Packing:
    return packing_of(tuple(used), list(used.values()), histogram_of(lengths), pack_length)


@given(
    problem=problems(),
    seed=st.integers(0, 5),
    separators=st.integers(0, 2),
    block=st.integers(1, 60) | st.just(baselines._BLOCK),
)
@settings(max_examples=120)
def test_next_fit_is_the_naive_one_on_the_shuffled_sequences(problem, seed, separators, block):
    lengths, pack_length, limit = problem
    arrivals = np.sort(np.array(lengths, dtype=np.uint8))
    np.random.default_rng(seed).shuffle(arrivals)
    expected = strategies_of(naive_next_fit(arrivals.tolist(), pack_length, limit, separators))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(baselines, "_BLOCK", block)
        used = next_fit(histogram_of(lengths), pack_length, limit, seed=seed, separators=separators)
    assert used == expected
    packing = checked(used, lengths, pack_length)
    assert packing.depth <= limit
    assert all(sum(s) + separators * (len(s) - 1) <= pack_length for s in packing.strategies)


@given(problem=problems())
@settings(max_examples=60)
def test_first_fit_decreasing_is_the_naive_one_over_single_sequences(problem):
    lengths, pack_length, limit = problem
    used = first_fit_decreasing(histogram_of(lengths), pack_length, limit)
    assert used == strategies_of(naive_first_fit_decreasing(lengths, pack_length, limit))
    assert checked(used, lengths, pack_length).depth <= limit


@given(problem=problems(), batch_size=st.integers(1, 50))
@settings(max_examples=60)
def test_sorted_batches_are_padded_to_their_longest_sequence(problem, batch_size):
    lengths = sorted(problem[0])
    batches = [lengths[start : start + batch_size] for start in range(0, len(lengths), batch_size)]
    found = sorted_batches(histogram_of(lengths), batch_size)
    assert found.slots == sum(len(batch) * batch[-1] for batch in batches)
    assert (found.batch_size, found.sequences, found.tokens) == (batch_size, len(lengths), sum(lengths))
    assert found.efficiency == found.tokens / found.slots <= 1


@given(problem=problems(), share=st.floats(0, 1), seed=st.integers(0, 5))
@settings(max_examples=60)
def test_a_sample_has_the_requested_number_and_no_sequence_twice(problem, share, seed):
    histogram = histogram_of(problem[0])
    number = max(1, round(share * histogram.sequences))
    sample = sample_histogram(histogram, number, seed=seed)
    assert sample.sequences == number
    assert (sample.counts <= histogram.counts).all()
    np.testing.assert_array_equal(sample.counts, sample_histogram(histogram, number, seed=seed).counts)


def test_deep_packs_of_short_sequences_are_counted_rightly():
    """More sequences per pack than the type of their lengths can count, and than digits fit into 64 bits."""
    lengths = [1] * 2500 + [2] * 3
    used = next_fit(histogram_of(lengths), 1000, 1000)
    assert checked(used, lengths, 1000).packs == 3
    mixed = [1 + index % 200 for index in range(3000)]
    packing = checked(next_fit(histogram_of(mixed), 4000, 4000), mixed, 4000)
    assert packing.depth > 30


def test_a_sequence_that_fills_the_pack_needs_no_separator():
    assert next_fit(histogram_of([4, 4]), 4, 4, separators=2) == {(4,): 2}
    assert next_fit(histogram_of([2, 2]), 4, 4, separators=1) == {(2,): 2}
    assert next_fit(histogram_of([2, 2]), 5, 4, separators=1) == {(2, 2): 1}


def test_next_fit_gives_the_published_figures_of_wikipedia():
    sample = sample_histogram(published("wikipedia_512"), 2_000_000, seed=0)
    lengths = np.repeat(np.arange(1, 513), sample.counts)
    np.random.default_rng(0).shuffle(lengths)
    packs = [sum(len(ends) for _, ends in next_fit_ends(lengths, 512, 512, separators)) for separators in (0, 1, 2)]
    efficiencies = [sample.tokens / (512 * number) * 100 for number in packs]
    assert efficiencies[0] == pytest.approx(78.24, abs=0.05)
    assert efficiencies[0] - efficiencies[1] == pytest.approx(0.13, abs=0.02)
    assert efficiencies[0] - efficiencies[2] == pytest.approx(0.27, abs=0.02)


def test_what_cannot_be_packed_is_refused_with_its_value():
    histogram = histogram_of([3, 5])
    with pytest.raises(PackingError, match="batch_size must be 1 sequence or more, found 0"):
        sorted_batches(histogram, 0)
    for number in (0, 3):
        with pytest.raises(PackingError, match=f"must have 1 to 2 sequences, found {number}"):
            sample_histogram(histogram, number, seed=0)
    with pytest.raises(PackingError, match="of 2000000000 sequences a hundredth can be drawn at most, found 20000001"):
        sample_histogram(LengthHistogram(counts=np.array([2 * 10**9])), 20_000_001, seed=0)


def test_more_sequences_than_there_is_memory_for_are_refused_with_what_would_fit():
    trillion = LengthHistogram(counts=np.array([0, 3 * 10**11, 7 * 10**11]))
    memory = memory_bytes()
    with pytest.raises(PackingError) as refused:
        pack(trillion, "next_fit", pack_length=8)
    for part in ("1,000,000,000,000 of them", f"{memory // 20:,} sequences would fit", "--sample", "first_fit_decr"):
        assert part in str(refused.value)
    assert pack(trillion, "first_fit_decreasing", pack_length=8).sequences == 10**12


def test_a_sample_can_be_drawn_from_billions():
    counts = np.array([3 * 10**11, 0, 10**11])
    sample = sample_histogram(LengthHistogram(counts=counts), 10_000, seed=0)
    assert sample.sequences == 10_000
    assert len(sample.counts) == 3
    assert abs(sample.counts[0] - 7500) < 5 * 44  # five standard deviations
    assert sample.counts[1] == 0
