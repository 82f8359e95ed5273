"""Functions that all figures share."""

from pathlib import Path

import numpy as np
import pytest

from evenpack.errors import ConfigError
from evenpack.studies.plotting import COLOURS, figure_as_png, line_style, require_plot, smooth, write_footer


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("x.svg", r"--plot writes a PNG file: give a name like .*x\.png"),
        ("", r"give a name like .*/result\.png"),
        ("file/x.png", "is not a folder"),
    ],
)
def test_a_place_where_no_plot_can_be_is_refused_before_the_work(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=message):
        require_plot(tmp_path / name)
    with pytest.raises(ConfigError, match=r"give a name like result\.png, not \."):
        require_plot(Path())


def test_no_two_lines_look_alike() -> None:
    assert len(set(COLOURS)) == len(COLOURS) == 12
    assert len({tuple(line_style(index).items()) for index in range(36)}) == 36
    assert len({line_style(index)["color"] for index in range(12)}) == 12


def test_smoothing_keeps_a_constant_and_means_over_a_fiftieth_of_the_values() -> None:
    assert smooth(np.full(500, 2.0)) == pytest.approx(np.full(500, 2.0))
    spike = np.zeros(500)
    spike[250] = 11.0
    assert smooth(spike)[245:256] == pytest.approx(np.ones(11))
    assert smooth(spike)[[244, 256]] == pytest.approx(np.zeros(2))
    assert smooth(np.array([1.0, 5.0])) == pytest.approx(np.array([1.0, 5.0]))


def test_what_is_not_a_number_counts_for_nothing_in_a_mean() -> None:
    values = np.arange(20.0)
    values[10] = np.nan
    assert smooth(values)[10] == pytest.approx((8 + 9 + 11 + 12) / 4)
    assert np.isnan(smooth(np.full(20, np.nan))).all()


def test_a_footer_is_below_everything_and_does_not_widen_the_figure(tmp_path: Path) -> None:
    words = "run: data a, b; evenpack 0.1.0, commit 0123456789ab; 2 x NVIDIA H100 80GB HBM3; " * 6
    with figure_as_png(tmp_path / "figure.png", width=4.0, height=2.0) as figure:
        axes = figure.add_subplot()
        axes.set_xlabel("a label\nof many\nlines\nbelow\nthe axes")
        figure.draw_without_rendering()  # which lays it out
        before = figure.get_tightbbox()
        write_footer(figure, [words, "the second line"])
        (footer,) = figure.texts
        box = footer.get_window_extent().transformed(figure.dpi_scale_trans.inverted())
        assert box.y1 < before.y0
        assert box.x0 == pytest.approx(before.x0)
        assert box.x1 <= before.x1
        assert footer.get_text().replace("\n", " ") == words + "the second line"
