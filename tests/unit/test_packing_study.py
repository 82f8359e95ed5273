"""`study packing`: the published tables, and the comparison's own rules."""

import numpy as np
import pytest

from evenpack.data.packing import LengthHistogram
from evenpack.errors import DataError, PackingError
from evenpack.launcher import inspection
from evenpack.studies.lengths import read_histogram
from evenpack.studies.packing import study_packing
from evenpack.studies.published import published_histogram, published_names


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


def test_a_file_that_is_not_there_is_told_with_the_published_names():
    with pytest.raises(DataError, match=r"nowhere cannot be read.*wikipedia_512"):
        read_histogram("nowhere")


def test_the_study_of_squad_gives_the_published_table():
    rows = study_packing(published_histogram("squad_1_1_384"), pack_length=384, depths=(1, 2, 3, None))
    packs = {(row.algorithm, row.depth_limit): row.packs for row in rows}
    assert packs[("none", 1)] == 88_641
    assert packs[("shortest_pack_first", 2)] == 45_335
    assert packs[("shortest_pack_first", 3)] == packs[("shortest_pack_first", None)] == 40_711
    assert packs[("longest_pack_first", 3)] == packs[("longest_pack_first", None)] == 40_631
    assert packs[("least_squares", 3)] == pytest.approx(40_778, abs=5)
    assert packs[("cutting_stock", 3)] == 40_195
    assert ("next_fit", None) in packs
    assert ("next_fit", 3) not in packs


def test_rows_of_one_depth_share_the_best_bound_and_others_do_not():
    rows = study_packing(LengthHistogram(counts=np.array([0, 300])), pack_length=8, depths=(2, None))
    bounds = {
        row.depth_limit: {other.lower_bound for other in rows if other.depth_limit == row.depth_limit} for row in rows
    }
    assert bounds == {2: {150}, None: {75}}
    greedy = next(row for row in rows if row.algorithm == "longest_pack_first" and row.depth_limit == 2)
    assert greedy.gap == 0


def test_named_algorithms_run_at_every_depth_and_each_is_announced():
    announced = []
    rows = study_packing(
        LengthHistogram(counts=np.array([4, 5, 6])),
        pack_length=6,
        depths=(2, None),
        algorithms=("first_fit_decreasing", "next_fit"),
        begin=lambda *both: announced.append(both),
    )
    expected = [(name, depth) for depth in (2, None) for name in ("first_fit_decreasing", "next_fit")]
    assert [(row.algorithm, row.depth_limit) for row in rows] == announced == expected


def test_wrong_depths_and_algorithms_are_refused():
    histogram = LengthHistogram(counts=np.array([1]))
    with pytest.raises(PackingError, match="found 0"):
        study_packing(histogram, pack_length=2, depths=(0,))
    with pytest.raises(PackingError, match="no packing algorithm 'knapsack'"):
        study_packing(histogram, pack_length=2, algorithms=("knapsack",))


def test_the_command_says_which_depth_is_no_number():
    with pytest.raises(inspection.ConfigError, match="'x' is neither a number"):
        inspection._depths("2,x")
    assert inspection._depths("2, none") == (2, None)
