"""Figures."""

import sys
from pathlib import Path

import numpy as np
import pytest

from evenpack.data.packing import LengthHistogram
from evenpack.errors import ConfigError
from evenpack.studies.lengths.statistics import length_statistics
from evenpack.studies.packing.packing import study_packing, sweep_pack_lengths
from evenpack.studies.plots import LossCurve, plot_depth_curves, plot_loss, plot_packing, require_plot, smooth, spread

PNG = b"\x89PNG\r\n"


def test_a_loss_curve_becomes_a_png(tmp_path: Path) -> None:
    steps = list(range(1, 201))
    curve = LossCurve(
        steps=steps,
        losses=[4 + 100 / (step + 20) for step in steps],
        validation={"wiki": [(100, 5.0), (200, 4.6)], "code": [(200, 4.5)]},
    )
    plot_loss(curve, tmp_path / "new" / "loss.png", name="demo")
    assert (tmp_path / "new" / "loss.png").read_bytes().startswith(PNG)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["loss.png"]


def test_a_curve_of_one_step_can_be_drawn_and_one_without_is_an_error(tmp_path: Path) -> None:
    plot_loss(LossCurve(steps=[1], losses=[3.0], validation={}), tmp_path / "loss.png", name="short")
    assert (tmp_path / "loss.png").exists()
    with pytest.raises(ConfigError, match="has no step yet"):
        plot_loss(LossCurve(steps=[], losses=[], validation={}), tmp_path / "none.png", name="empty")


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


@pytest.mark.parametrize(
    ("name", "message"),
    [("x.svg", r"give --plot a name like .*x\.png"), ("", "a plot is a PNG file"), ("file/x.png", "is no folder")],
)
def test_a_place_where_no_plot_can_be_is_refused_before_the_work(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=message):
        require_plot(tmp_path / name)


def test_without_matplotlib_the_error_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"evenpack\[plots\]"):
        plot_loss(LossCurve(steps=[1], losses=[3.0], validation={}), tmp_path / "loss.png", name="demo")
    assert list(tmp_path.iterdir()) == []


def test_smoothing_keeps_a_constant_and_means_over_a_fiftieth_of_the_run() -> None:
    assert smooth(np.full(500, 2.0)) == pytest.approx(np.full(500, 2.0))
    spike = np.zeros(500)
    spike[250] = 11.0
    assert smooth(spike)[245:256] == pytest.approx(np.ones(11))
    assert smooth(spike)[[244, 256]] == pytest.approx(np.zeros(2))
    assert smooth(np.array([1.0, 5.0])) == pytest.approx(np.array([1.0, 5.0]))


def test_labels_keep_their_distance_and_stay_above_the_bottom() -> None:
    assert spread([9.0, 5.0, 1.0], gap=1.0, low=0.0) == [9.0, 5.0, 1.0]
    assert spread([5.0, 4.9, 4.8], gap=1.0, low=0.0) == [5.0, 4.0, 3.0]
    assert spread([0.3, 0.2, 0.1], gap=1.0, low=0.0) == [2.0, 1.0, 0.0]
