"""Lengths and packings as figures."""

from pathlib import Path

import numpy as np
import pytest
from seen_figures import DrawnFigure

from evenpack.data.packing import LengthHistogram
from evenpack.studies.lengths.statistics import histogram_distance
from evenpack.studies.packing.presentation import percent_between, plot_packing
from evenpack.studies.packing.study import Against, PackingRow, study_packing

PNG = b"\x89PNG\r\n"
LENGTHS = LengthHistogram(counts=np.arange(1, 65))
OTHER = LengthHistogram(counts=np.ones(100, dtype=np.int64))
OTHERS = Against(name="theirs", histogram=OTHER, distance=histogram_distance(LENGTHS, OTHER, origin="theirs"))


def rows_of(lengths: LengthHistogram, pack_length: int = 64) -> tuple[PackingRow, ...]:
    return study_packing(lengths, pack_length=pack_length, depths=(1, 3, None))


@pytest.mark.slow
def test_a_figure_of_packings_says_what_it_is_of_and_nothing_covers_anything(
    drawn: list[DrawnFigure], tmp_path: Path
) -> None:
    rows = rows_of(LENGTHS)
    path = tmp_path / "two.png"
    plot_packing("mine", LENGTHS, rows, path, footer=["mine: data"], against=OTHERS)
    assert path.read_bytes().startswith(PNG)
    (figure,) = drawn
    assert figure.footer == "mine: data"
    assert {"mine", "theirs"} <= set(figure.labels), "the lengths and what they are compared with are named"
    assert "sequences (% per 2 tokens of length)" in figure.labels
    assert figure.tops[1:] == (100,), "no pack is fuller"
    assert figure.collisions == ()


def test_bars_are_percentages_of_all_sequences() -> None:
    histogram = LengthHistogram(counts=np.array([1, 0, 2, 1]))
    assert percent_between(histogram, np.array([0, 2, 4, 6])).tolist() == [25.0, 75.0, 0.0]
