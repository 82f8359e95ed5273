"""The loss curve of a run as a figure."""

import sys
from pathlib import Path

import numpy as np
import pytest

from evenpack.errors import ConfigError
from evenpack.launcher.loss_plot import LossCurve, plot_loss, smooth

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


def test_smoothing_keeps_a_constant_and_means_over_a_fiftieth_of_the_run() -> None:
    assert smooth(np.full(500, 2.0)) == pytest.approx(np.full(500, 2.0))
    spike = np.zeros(500)
    spike[250] = 11.0
    assert smooth(spike)[245:256] == pytest.approx(np.ones(11))
    assert smooth(spike)[[244, 256]] == pytest.approx(np.zeros(2))
    assert smooth(np.array([1.0, 5.0])) == pytest.approx(np.array([1.0, 5.0]))


def test_without_matplotlib_the_error_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"evenpack\[plots\]"):
        plot_loss(LossCurve(steps=[1], losses=[3.0], validation={}), tmp_path / "loss.png", name="demo")
    assert list(tmp_path.iterdir()) == []
