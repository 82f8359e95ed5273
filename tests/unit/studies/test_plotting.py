"""Functions that all figures share."""

from pathlib import Path

import numpy as np
import pytest

from evenpack.errors import ConfigError
from evenpack.studies.plotting import require_plot, smooth


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
