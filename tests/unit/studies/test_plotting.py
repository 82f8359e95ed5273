"""What all figures share."""

from pathlib import Path

import pytest

from evenpack.errors import ConfigError
from evenpack.studies.plotting import require_plot, spread


@pytest.mark.parametrize(
    ("name", "message"),
    [("x.svg", r"give --plot a name like .*x\.png"), ("", "a plot is a PNG file"), ("file/x.png", "is no folder")],
)
def test_a_place_where_no_plot_can_be_is_refused_before_the_work(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=message):
        require_plot(tmp_path / name)


def test_labels_keep_their_distance_and_stay_above_the_bottom() -> None:
    assert spread([9.0, 5.0, 1.0], gap=1.0, low=0.0) == [9.0, 5.0, 1.0]
    assert spread([5.0, 4.9, 4.8], gap=1.0, low=0.0) == [5.0, 4.0, 3.0]
    assert spread([0.3, 0.2, 0.1], gap=1.0, low=0.0) == [2.0, 1.0, 0.0]
