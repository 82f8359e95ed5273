"""Column generation packs published histograms to within a few packs of a bound that an independent count confirms."""

import sys
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from repository import PUBLISHED_HISTOGRAMS

from evenpack.data.packing import Certificate, LengthHistogram, Packing, pack
from evenpack.data.packing.pricing import best_packs


def cut(counts: list[int], pack_length: int, limit: int | None) -> Packing:
    histogram = LengthHistogram(counts=np.array(counts))
    return pack(histogram, "cutting_stock", pack_length=pack_length, max_sequences_per_pack=limit)


def counts_of_some_lengths(longest: int, most: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.one_of(st.just(0), st.integers(0, most)), min_size=1, max_size=longest).filter(any)


def greatest_worth(certificate: Certificate, counts: list[int], pack_length: int, limit: int) -> int:
    """Returns the greatest value of a pack over lengths that occur, with Python's integers, sequence by sequence."""
    worth = [0] * (pack_length + 1)
    for _ in range(min(limit, pack_length)):
        before = worth[:]
        for index, count in enumerate(counts):
            price = int(certificate.prices[index])
            for room in range(index + 1, pack_length + 1) if count else ():
                worth[room] = max(worth[room], before[room - index - 1] + price)
        if worth == before:
            break
    return max(worth)


@given(counts=counts_of_some_lengths(14, 10**10), more=st.integers(0, 6), limit=st.none() | st.integers(1, 6))
@settings(max_examples=80)
def test_no_pack_is_worth_more_than_the_certificate_says_and_the_bound_follows(counts, more, limit):
    pack_length = len(counts) + more
    packing = cut(counts, pack_length, limit)
    certificate = packing.certificate
    assert certificate is not None
    assert min(certificate.prices.tolist()) >= 0
    assert greatest_worth(certificate, counts, pack_length, limit or pack_length) <= certificate.pack_value
    worth = sum(count * int(price) for count, price in zip(counts, certificate.prices, strict=False))
    assert packing.lower_bound == -(-worth // certificate.pack_value)
    assert packing.lower_bound <= packing.packs


@given(counts=counts_of_some_lengths(14, 10**7), more=st.integers(0, 6), limit=st.none() | st.integers(1, 6))
@settings(max_examples=60)
def test_never_more_packs_than_longest_pack_first_nor_a_bound_below_the_tokens(counts, more, limit):
    pack_length = len(counts) + more
    packing = cut(counts, pack_length, limit)
    greedy = pack(packing.histogram, "longest_pack_first", pack_length=pack_length, max_sequences_per_pack=limit)
    assert packing.packs <= greedy.packs
    assert packing.lower_bound >= greedy.lower_bound


@given(counts=counts_of_some_lengths(8, 3).filter(lambda counts: sum(counts) <= 7), limit=st.integers(1, 4))
@settings(max_examples=60)
def test_the_bound_is_below_the_best_that_trying_all_finds(counts, limit):
    lengths = [index + 1 for index, count in enumerate(counts) for _ in range(count)]
    pack_length = max(len(counts), 8)

    def fewest(rest: tuple[int, ...]) -> int:
        if not rest:
            return 0
        first, others = rest[0], rest[1:]
        best = len(rest)
        for mask in range(1 << len(others)):
            mates = [length for index, length in enumerate(others) if mask >> index & 1]
            if len(mates) < limit and first + sum(mates) <= pack_length:
                left = tuple(length for index, length in enumerate(others) if not mask >> index & 1)
                best = min(best, 1 + fewest(left))
        return best

    optimum = fewest(tuple(sorted(lengths, reverse=True)))
    packing = cut(counts, pack_length, limit)
    assert packing.lower_bound <= optimum <= packing.packs


@pytest.mark.parametrize(
    ("name", "limit", "bound", "most_packs"),
    [
        ("wikipedia_512", None, 8_135_727, 8_135_728),
        pytest.param("wikipedia_512", 4, 8_135_727, 8_135_740, marks=pytest.mark.slow),
        ("wikipedia_512", 8, 8_135_727, 8_135_732),
        pytest.param("wikipedia_1024", 4, 21_697_115, 21_697_125, marks=pytest.mark.slow),
        pytest.param("wikipedia_2048", None, 6_294_495, 6_294_495, marks=pytest.mark.slow),
        pytest.param("wikipedia_2048", 3, 9_236_660, 9_236_662, marks=pytest.mark.slow),
        pytest.param("wikipedia_2048", 8, 6_294_495, 6_294_525, marks=pytest.mark.slow),
        ("squad_1_1_384", None, 40_195, 40_195),
    ],
)
def test_published_histograms_are_closed_to_a_few_packs(name, limit, bound, most_packs):
    packing = cut(PUBLISHED_HISTOGRAMS[name], len(PUBLISHED_HISTOGRAMS[name]), limit)
    assert packing.lower_bound == bound
    assert bound <= packing.packs <= most_packs
    assert packing.depth <= (limit or 512)


@given(
    counts=counts_of_some_lengths(12, 3),
    limit=st.none() | st.integers(1, 5),
    share=st.floats(0, 1),
    seed=st.integers(0, 9),
)
def test_a_near_best_pack_keeps_the_limits_and_loses_at_most_the_tolerance(counts, limit, share, seed):
    pack_length, most = len(counts) + 4, limit or len(counts) + 4
    prices = np.random.default_rng(seed).random(pack_length)
    best = best_packs(prices, LengthHistogram(counts=np.array(counts)), pack_length, most)
    worth = best.values_with()
    for first in (np.flatnonzero(counts) + 1).tolist():
        tolerance = share * float(worth[first - 1])
        strategy = best.near_best(first, tolerance, Random(seed))
        assert first in strategy
        assert sum(strategy) <= pack_length
        assert len(strategy) <= most
        assert all(counts[length - 1] for length in strategy)
        value = sum(prices[length - 1] for length in strategy)
        assert worth[first - 1] - tolerance - 1e-9 <= value <= worth[first - 1] + 1e-9
    assert max(worth[: len(counts)]) == pytest.approx(best.value)


def test_packs_longer_than_the_longest_sequence_are_filled():
    """27 and 9 make 36, as do four of 9: nothing is left empty."""
    counts = [0] * 27
    counts[26], counts[8] = 10, 22
    packing = cut(counts, 36, None)
    assert (packing.packs, packing.lower_bound, packing.padding) == (13, 13, 0)


def test_a_limit_of_depth_raises_the_bound_above_that_of_the_tokens():
    packing = cut([0, 300], 8, 2)
    assert (packing.packs, packing.lower_bound) == (150, 150)


def test_rounds_that_run_out_leave_a_whole_result(monkeypatch):
    whole = cut(PUBLISHED_HISTOGRAMS["wikipedia_512"], 512, 3)
    monkeypatch.setattr(sys.modules["evenpack.data.packing.cutting_stock"], "_MOST_ROUNDS", 2)
    cut_short = cut(PUBLISHED_HISTOGRAMS["wikipedia_512"], 512, 3)
    greedy = pack(whole.histogram, "longest_pack_first", pack_length=512, max_sequences_per_pack=3)
    assert whole.packs < cut_short.packs < greedy.packs
    assert cut_short.lower_bound <= whole.lower_bound
