"""Figures of `study imbalance`: what is measured, estimated and published is told apart, with its origin."""

from pathlib import Path

import pytest
from drawn_figures import texts_of
from logged_runs import CPU, log_run
from matplotlib.figure import Figure
from studied_runs import studied

from evenpack.engine.config import RunConfig
from evenpack.studies.imbalance import presentation
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


@pytest.mark.slow
def test_a_log_of_another_device_than_the_cost_models_is_warned_of(packed: RunConfig) -> None:
    log_run(packed)
    (warning,) = studied(packed).warnings
    assert f"packed was measured on {CPU}, and the simulated lines are an ESTIMATE for NVIDIA H100, bfloat16" in warning
    log_run(packed, device="NVIDIA H100 80GB HBM3")
    assert studied(packed).warnings == ()


@pytest.mark.slow
def test_figures_tell_what_was_measured_from_what_was_estimated(
    packed: RunConfig, padded: RunConfig, tmp_path: Path, drawn: list[Figure]
) -> None:
    log_run(packed)
    study = studied(packed, baseline_run=log_run(padded, seconds=1.0))
    presentation.plot_imbalance(study, tmp_path / "figure.png")
    (speed_ups,) = drawn
    for words in (
        "SIMULATED with an ESTIMATED cost model, nothing measured: NVIDIA H100, bfloat16",
        f"MEASURED: packed (packs, assigned by cost) on 2 x {CPU}",
        f"WARNING: packed was measured on {CPU}",
    ):
        assert words in texts_of(speed_ups), words
    (point,) = [line for line in speed_ups.axes[0].lines if line.get_marker() == "D"]
    assert point.get_xydata()[0] == pytest.approx([2.0, 2.0])
