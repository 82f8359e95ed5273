"""Figures of `study imbalance`: what is measured, estimated and published is told apart, with its origin."""

import itertools
import json
import struct
from pathlib import Path

import pytest
from drawn_figures import keep_figures, texts_of
from logged_runs import CPU, log_run
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from studied_runs import studied

from evenpack.engine.config import RunConfig
from evenpack.studies.imbalance import presentation
from evenpack.studies.imbalance.cluster import SCHEMES
from evenpack.studies.imbalance.measurement import is_same_device

pytestmark = pytest.mark.usefixtures("simulated_once")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100, bfloat16", True),
        ("NVIDIA A100-SXM4-80GB", "NVIDIA H100, bfloat16", False),
        (CPU, "NVIDIA H100, bfloat16", False),
        (CPU, CPU, True),
        ("CPU (EPYC 7B13), 1 thread a rank", "CPU (EPYC 7B13), 2 threads a rank", False),
    ],
)
def test_devices_are_told_apart_by_their_model(one: str, other: str, same: bool) -> None:
    assert is_same_device(one, other) == same


def test_a_log_of_another_device_than_the_cost_models_is_warned_of(packed: RunConfig) -> None:
    log_run(packed)
    (warning,) = studied(packed).warnings
    assert f"packed was measured on {CPU}, and the simulated lines are an ESTIMATE for NVIDIA H100, bfloat16" in warning
    log_run(packed, device="NVIDIA H100 80GB HBM3")
    assert studied(packed).warnings == ()


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are drawn while a test runs."""
    return keep_figures(monkeypatch, presentation)


def test_figures_tell_what_was_measured_from_what_was_estimated(
    packed: RunConfig, padded: RunConfig, tmp_path: Path, figures: list[Figure]
) -> None:
    log_run(packed)
    study = studied(packed, baseline_run=log_run(padded, seconds=1.0))
    presentation.plot_imbalance(study, tmp_path / "figure.png")
    (speed_ups,) = figures
    width, _ = struct.unpack(">II", (tmp_path / "figure.png").read_bytes()[16:24])
    assert width < 1_800, "as wide as a page shows it"
    for words in (
        "SIMULATED with an ESTIMATED cost model, nothing measured: NVIDIA H100, bfloat16",
        f"MEASURED: packed (packs, assigned by cost) on 2 x {CPU}",
        f"WARNING: packed was measured on {CPU}",
        "Simulated: lengths of packed: data ",
        f"Measured: padded: data one ({read_fingerprint(padded)}); evenpack 0.0, commit abc123; 2 x {CPU}",
    ):
        assert words in texts_of(speed_ups), words
    assert "published" not in texts_of(speed_ups)
    (axes,) = speed_ups.axes
    simulated = [line for line in axes.lines if line.get_marker() == "o"]
    assert {line.get_markerfacecolor() for line in simulated} == {"white"}
    (point,) = [line for line in axes.lines if line.get_marker() == "D"]
    assert point.get_xydata()[0] == pytest.approx([2.0, 2.0])


def test_no_two_schemes_have_one_colour() -> None:
    """Nor nearly one: colours differ by a tenth of the range of at least one of red, green and blue."""
    colours = [to_rgb(presentation.colour(scheme)) for scheme in SCHEMES]
    for one, other in itertools.combinations(colours, 2):
        assert max(abs(a - b) for a, b in zip(one, other, strict=True)) > 0.1


def test_marks_are_filled_where_the_cost_model_was_measured(
    packed: RunConfig, tmp_path: Path, figures: list[Figure]
) -> None:
    study = studied(packed, cost_model="gpt2_xl_width_cpu")
    presentation.plot_imbalance(study, tmp_path / "figure.png")
    (figure,) = figures
    assert "SIMULATED with a cost model measured on CPU" in texts_of(figure)
    assert "white" not in {line.get_markerfacecolor() for line in figure.axes[0].lines}


def read_fingerprint(config: RunConfig) -> str:
    """As a footer shows it."""
    fingerprint: str = json.loads((config.run.output_dir / "run.json").read_text())["data"]["fingerprint"]
    return fingerprint[:12]
