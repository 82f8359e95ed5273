"""Lengths and packings as figures."""

from pathlib import Path

import numpy as np
import pytest
from seen_figures import DrawnFigure

from evenpack.data.packing import LengthHistogram
from evenpack.studies.lengths.statistics import histogram_distance
from evenpack.studies.packing.presentation import percent_between, plot_packing
from evenpack.studies.packing.study import Against, PackingRow, Sweep, recommend, study_packing, sweep_pack_lengths

PNG = b"\x89PNG\r\n"
LENGTHS = LengthHistogram(counts=np.arange(1, 65))
OTHER = LengthHistogram(counts=np.ones(100, dtype=np.int64))
OTHERS = Against(name="theirs", histogram=OTHER, distance=histogram_distance(LENGTHS, OTHER, origin="theirs"))


def rows_of(lengths: LengthHistogram, pack_length: int = 64) -> tuple[PackingRow, ...]:
    return study_packing(lengths, pack_length=pack_length, depths=(1, 3, None))


def sweep_of(lengths: LengthHistogram, rows: tuple[PackingRow, ...], longer: int = 96) -> Sweep:
    """Over the pack length of `rows` and a longer one."""

    def swept(algorithm: str, depths: tuple[int | None, ...]) -> tuple[PackingRow, ...]:
        both = (rows[0].pack_length, longer)
        return sweep_pack_lengths(lengths, both, algorithm=algorithm, depths=depths)

    fullest = swept("auto", (None,))
    return Sweep(
        rows=swept("longest_pack_first", (1, 2, None)),
        algorithm="longest_pack_first",
        fullest=fullest,
        recommended=recommend(rows, fullest, lambda chosen: swept("auto", (1, 2, None))[3:]),
    )


@pytest.mark.slow
def test_a_figure_of_packings_says_what_it_is_of_and_nothing_covers_anything(
    drawn: list[DrawnFigure], tmp_path: Path
) -> None:
    rows = rows_of(LENGTHS)
    for name, against, sweep in (("two", OTHERS, None), ("three", None, sweep_of(LENGTHS, rows))):
        path = tmp_path / f"{name}.png"
        plot_packing("mine", LENGTHS, rows, path, footer=["mine: data"], against=against, sweep=sweep)
        assert path.read_bytes().startswith(PNG)
    two, three = drawn
    assert (two.footer, three.footer) == ("mine: data", "mine: data")
    assert {"mine", "theirs"} <= set(two.labels), "the lengths and what they are compared with are named"
    assert "sequences (% per 2 tokens of length)" in two.labels
    assert two.tops[1:] == three.tops[1:2] == three.tops[2:] == (100,), "no pack is fuller"
    assert two.collisions == three.collisions == ()


def test_the_title_gives_the_pack_length_that_is_recommended_and_not_the_fullest(
    drawn: list[DrawnFigure], tmp_path: Path
) -> None:
    """Packs of 254 are full, and packs of 128 less than a point below that: the longer ones are not worth it."""
    lengths = LengthHistogram(counts=np.eye(127, dtype=np.int64)[-1] * 2000)
    rows = rows_of(lengths, 128)
    sweep = sweep_of(lengths, rows, 254)
    assert [row.efficiency for row in sweep.fullest] == [127 / 128, 1.0]
    plot_packing("even", lengths, rows, tmp_path / "p.png", footer=["even"], sweep=sweep)
    assert drawn[0].titles[2] == "Recommended: 128 slots, 99.22 % full by auto"


def test_bars_are_percentages_of_all_sequences() -> None:
    histogram = LengthHistogram(counts=np.array([1, 0, 2, 1]))
    assert percent_between(histogram, np.array([0, 2, 4, 6])).tolist() == [25.0, 75.0, 0.0]
