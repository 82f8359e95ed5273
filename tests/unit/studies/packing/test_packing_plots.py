"""Lengths and packings as figures."""

from pathlib import Path

import numpy as np

from evenpack.data.packing import LengthHistogram
from evenpack.studies.lengths.statistics import length_statistics
from evenpack.studies.packing.packing import study_packing, sweep_pack_lengths
from evenpack.studies.packing.plots import plot_depth_curves, plot_packing

PNG = b"\x89PNG\r\n"


def test_lengths_and_packings_become_a_png(tmp_path: Path) -> None:
    histogram = LengthHistogram(counts=np.arange(1, 65))
    rows = study_packing(histogram, pack_length=64, baselines=False)
    statistics = length_statistics(histogram, pack_length=64)
    sweep = sweep_pack_lengths(histogram, (64, 96), algorithm="longest_pack_first", depths=(1, 2, None))
    plot_packing(histogram, statistics, rows, tmp_path / "two.png", pack_length=64)
    plot_packing(histogram, statistics, rows, tmp_path / "three.png", pack_length=64, sweep=sweep)
    widths = [int.from_bytes((tmp_path / f"{name}.png").read_bytes()[16:20]) for name in ("two", "three")]
    assert widths[1] > 1.5 * widths[0]


def test_depth_curves_become_a_png(tmp_path: Path) -> None:
    curves = {
        f"up to {longest}": sweep_pack_lengths(
            LengthHistogram(counts=np.arange(1, longest + 1)), (longest,), algorithm="auto", depths=(1, 2, None)
        )
        for longest in (16, 64)
    }
    plot_depth_curves(curves, tmp_path / "depths.png")
    assert (tmp_path / "depths.png").read_bytes().startswith(PNG)
