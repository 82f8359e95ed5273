"""`study packing`: the published tables, and the comparison's own rules."""

import numpy as np
import pytest

from evenpack.data.packing import LengthHistogram
from evenpack.errors import ConfigError, DataError, PackingError
from evenpack.studies.lengths.reading import published_histogram, published_names, read_histogram
from evenpack.studies.packing.study import (
    OVERVIEW_DEPTHS,
    PackerChoice,
    pack_lengths_to_try,
    parse_choices,
    parse_depths,
    parse_pack_lengths,
    recommend,
    study_packing,
    study_sorted_batches,
    sweep_pack_lengths,
)


@pytest.mark.parametrize(
    ("name", "sequences", "tokens"),
    [
        ("wikipedia_128", 35_970_508, 3_805_897_594),
        ("wikipedia_384", 18_608_128, 4_101_308_508),
        ("wikipedia_512", 16_279_552, 4_164_796_173),
        ("wikipedia_1024", 64_746_545, 22_217_605_516),
        ("wikipedia_2048", 24_674_909, 12_891_110_785),
        ("squad_1_1_384", 88_641, 15_249_479),
    ],
)
def test_published_histograms_have_the_totals_of_the_paper(name, sequences, tokens):
    histogram = published_histogram(name)
    assert (histogram.sequences, histogram.tokens) == (sequences, tokens)
    assert len(histogram.counts) == int(name.rpartition("_")[2])
    assert read_histogram(name).counts.tolist() == histogram.counts.tolist()
    assert name in published_names()


def test_a_file_that_is_not_there_is_reported_with_the_published_names():
    with pytest.raises(DataError, match=r"nowhere cannot be read.*wikipedia_512"):
        read_histogram("nowhere")


@pytest.mark.slow
def test_the_study_of_squad_gives_the_published_table():
    rows = study_packing(published_histogram("squad_1_1_384"), pack_length=384, depths=(1, 2, 3, None))
    packs = {(row.algorithm, row.depth_limit): row.packs for row in rows}
    assert packs[("none", 1)] == 88_641
    assert packs[("shortest_pack_first", 2)] == 45_335
    assert packs[("least_squares", 3)] == pytest.approx(40_778, abs=5)
    assert ("next_fit", None) in packs
    assert ("next_fit", 3) not in packs
    assert packs[("first_fit_decreasing", None)] == 40_631


def test_without_baselines_the_study_of_squad_has_the_greedy_and_the_exact_packings():
    rows = study_packing(published_histogram("squad_1_1_384"), pack_length=384, depths=(3, None), baselines=False)
    assert [(row.algorithm, row.depth_limit, row.packs) for row in rows] == [
        (name, depth, packs)
        for depth in (3, None)
        for name, packs in (("shortest_pack_first", 40_711), ("longest_pack_first", 40_631), ("cutting_stock", 40_195))
    ]


def test_wikipedia_at_512_gives_the_published_tables():
    """Tables 1 and 7, recomputed where the text prints shares only; least squares has a slow test of its own."""
    names = ("longest_pack_first", "shortest_pack_first")
    choices = [PackerChoice(algorithm=name) for name in names]
    depths = (2, 3, 4, 8, 16, None)
    rows = study_packing(published_histogram("wikipedia_512"), pack_length=512, depths=depths, choices=choices)
    found = {(row.algorithm, row.depth_limit): row for row in rows}
    longest = [found[("longest_pack_first", depth)] for depth in depths]
    assert [row.packs for row in longest] == [10_099_081, 9_090_154, 8_657_119, 8_207_569, 8_140_006, 8_138_483]
    assert [row.strategies for row in longest] == [634, 648, 671, 670, 670, 670]
    assert [row.padding for row in longest][:4] == [1_005_933_299, 489_362_675, 267_648_755, 37_479_155]
    assert [round(100 * row.efficiency, 3) for row in longest] == [80.546, 89.485, 93.962, 99.108, 99.931, 99.949]
    assert [f"{row.packing_factor:.3f}" for row in longest] == ["1.612", "1.791", "1.880", "1.983", "2.000", "2.000"]
    assert longest[-1].depth == 29
    shortest = [found[("shortest_pack_first", depth)] for depth in (2, 3, 4, 8, None)]
    assert [row.packs for row in shortest] == [10_101_683, 9_094_695, 8_658_996, 8_224_673, 8_166_708]
    assert shortest[-1].depth == 16


def test_the_speed_up_is_that_over_padding_to_the_longest_sequence():
    histogram = LengthHistogram(counts=np.array([0, 0, 6, 0, 2]))
    row = study_packing(histogram, pack_length=6, depths=(None,), choices=(PackerChoice(algorithm="auto"),))[0]
    assert row.packs == 5
    assert row.algorithm == "longest_pack_first"
    assert row.speed_up == pytest.approx(8 * 5 / (5 * 6))


def test_sorted_batches_are_compared_at_the_sizes_that_there_are_sequences_for():
    histogram = LengthHistogram(counts=np.array([20, 0, 0, 20]))
    rows = study_sorted_batches(histogram, (8, 40, 41))
    assert [row.batch_size for row in rows] == [8, 40]
    assert rows[0].slots == 16 + 24 * 4
    assert rows[1].slots == 160
    assert rows[0].speed_up == pytest.approx(160 / 112)


def test_longer_packs_are_tried_up_to_twice_the_length():
    assert pack_lengths_to_try(27) == (27, 32, 34, 36, 41, 54)
    assert pack_lengths_to_try(512) == (512, 600, 640, 688, 768, 1024)
    assert pack_lengths_to_try(1) == (1, 2)
    assert pack_lengths_to_try(10_000_000)[-1] == 15_000_000, "no pack can be longer"


def test_figure_10_is_a_sweep_over_depths():
    rows = sweep_pack_lengths(
        published_histogram("wikipedia_2048"), [2048], algorithm="longest_pack_first", depths=(1, 3, 12, None)
    )
    assert [f"{row.speed_up:.2f}" for row in rows] == ["1.00", "2.45", "3.73", "3.92"]


def _molecules(pack_length):
    """Returns lengths like those of QM9 (section Q): about two thirds of the longest, so that two exceed its length."""
    histogram = LengthHistogram(counts=np.array([0] * 14 + [5, 30, 200, 600, 200, 30, 5, 3, 2, 2, 1, 1, 1]))
    return recommended(histogram, pack_length, pack_lengths_to_try(pack_length))


def recommended(histogram, pack_length, tried, depths=OVERVIEW_DEPTHS):
    """Computes the recommendation as `inspect` does."""
    rows = study_packing(histogram, pack_length=pack_length, depths=depths, baselines=False)
    return recommend(
        rows,
        sweep_pack_lengths(histogram, tried, algorithm="auto", depths=(None,)),
        lambda chosen: sweep_pack_lengths(histogram, [chosen], algorithm="auto", depths=depths),
    )


def test_longer_packs_are_recommended_where_they_fill_better():
    found = _molecules(27)
    assert found.pack_length == 36
    assert found.efficiency > 0.98
    assert found.sufficient_depth == 2
    assert "points fuller than 27" in found.reason


def test_the_pack_length_stays_where_longer_ones_gain_less_than_a_point():
    found = _molecules(36)
    assert found.pack_length == 36
    assert "less than 1 point fuller" in found.reason


@pytest.mark.slow
def test_the_least_sufficient_depth_is_recommended():
    found = recommended(published_histogram("wikipedia_512"), 512, (512, 768), depths=(2, 3, 4, None))
    assert (found.pack_length, found.sufficient_depth) == (512, 3)
    assert found.efficiency_at_depth == pytest.approx(0.99884, abs=1e-5)


def test_rows_of_one_depth_share_the_best_bound_and_others_do_not():
    rows = study_packing(LengthHistogram(counts=np.array([0, 300])), pack_length=8, depths=(2, None))
    bounds = {
        row.depth_limit: {other.lower_bound for other in rows if other.depth_limit == row.depth_limit} for row in rows
    }
    assert bounds == {2: {150}, None: {75}}
    greedy = next(row for row in rows if row.algorithm == "longest_pack_first" and row.depth_limit == 2)
    assert greedy.gap == 0


def test_wrong_depths_and_algorithms_are_refused():
    histogram = LengthHistogram(counts=np.array([1]))
    with pytest.raises(PackingError, match="found 0"):
        study_packing(histogram, pack_length=2, depths=(0,))
    with pytest.raises(PackingError, match="no packing algorithm 'knapsack'"):
        PackerChoice(algorithm="knapsack")
    assert (parse_depths("2, none"), parse_pack_lengths("27, 36")) == ((2, None), (27, 36))
    with pytest.raises(ConfigError, match="'x' is neither a number"):
        parse_depths("2,x")
    with pytest.raises(ConfigError, match="'0' is not a number of 1 or more"):
        parse_pack_lengths("27,0")


def test_algorithms_are_named_with_their_options():
    choices = parse_choices("auto, least_squares:weight=0.5:leftovers=best_fit,next_fit:separators=2")
    assert [choice.label for choice in choices] == [
        "auto",
        "least_squares weight=0.5 leftovers=best_fit",
        "next_fit separators=2",
    ]
    assert choices[1].options == {"weight": 0.5, "leftovers": "best_fit"}
    assert choices[2].options == {"separators": 2}
    with pytest.raises(ConfigError, match="'weight' gives no value; write least_squares:option=value"):
        parse_choices("least_squares:weight")


def test_a_longer_pack_is_recommended_where_only_cutting_stock_fills_it():
    """Longest pack first puts fewer of these into longer packs than there are in it; its word is not enough."""
    counts = np.zeros(96, dtype=np.int64)
    counts[28], counts[29:96] = 9458, np.arange(67, 0, -1)
    histogram = LengthHistogram(counts=counts)
    found = recommended(histogram, 96, (96, 144, 192))
    longest = [
        row.efficiency for row in sweep_pack_lengths(histogram, (96, 144, 192), algorithm="auto", depths=(None,))
    ]
    assert max(longest) - longest[0] > 0.01
    assert found.efficiency >= max(longest) - 0.01
    assert found.pack_length > 96


def test_what_an_algorithm_cannot_do_is_said_and_the_others_continue():
    refused = []
    choices = [PackerChoice(algorithm=name) for name in ("least_squares", "longest_pack_first")]
    histogram = LengthHistogram(counts=np.arange(1, 400))
    arguments = {"pack_length": 400, "depths": (4, 4), "choices": choices}
    rows = study_packing(histogram, **arguments, refused=lambda *told: refused.append(told))
    assert [row.algorithm for row in rows] == ["longest_pack_first"]
    assert [(name, depth) for name, depth, _ in refused] == [("least_squares", 4)]
    with pytest.raises(PackingError, match="set max_sequences_per_pack to 3 or less"):
        study_packing(histogram, **arguments)


def test_billions_of_sequences_are_studied_without_shuffling_them():
    histogram = LengthHistogram(counts=np.array([0] * 99 + [10**12]))
    rows = study_packing(histogram, pack_length=512, depths=(None,))
    assert [row.algorithm for row in rows] == [
        "first_fit_decreasing",
        "shortest_pack_first",
        "longest_pack_first",
        "cutting_stock",
    ]
