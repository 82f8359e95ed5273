"""A shuffle study as a figure."""

from pathlib import Path

import numpy as np
import pytest
from seen_figures import DrawnFigure

from evenpack.studies.plotting import COLOURS
from evenpack.studies.shuffle.config import ShuffleStudyConfig
from evenpack.studies.shuffle.study import plot_shuffle

MORE_ARMS_THAN_COLOURS = [f"arm_{index}" for index in range(len(COLOURS) + 1)]
LOSSES = {arm: {1: np.linspace(5.0, 4.0, 30), 2: np.linspace(5.1, 4.1, 30)} for arm in MORE_ARMS_THAN_COLOURS}


def study() -> ShuffleStudyConfig:
    phases = {"training": {"base": "run.yaml", "seeds": [1, 2], "arms": {arm: {} for arm in LOSSES}}}
    values = {
        "study": {"name": "small", "output_dir": "runs/small"},
        "phases": phases,
        "shuffle": {"reference": "arm_0"},
    }
    return ShuffleStudyConfig.model_validate(values)


@pytest.mark.slow
def test_every_arm_is_drawn_and_what_the_lines_and_bars_are_is_said(drawn: list[DrawnFigure], tmp_path: Path) -> None:
    jumps = {arm: {1: 0.1, 2: 0.2} for arm in LOSSES} | {"arm_2": {}}
    plot_shuffle(LOSSES, jumps, [10, 20], study(), tmp_path / "f.png", held_out=[], origin="ORIGIN")
    figure = drawn[0]
    assert set(MORE_ARMS_THAN_COLOURS) <= set(figure.labels)
    assert figure.titles == ("Loss by order of training", "Change at borders of blocks")
    assert figure.footer.startswith("ORIGIN Seeds 1, 2. Lines: running means of a few steps, ")
    assert "Dotted: borders of the blocks" in figure.footer
    assert figure.collisions == ()


@pytest.mark.slow
def test_a_step_that_was_left_out_is_smoothed_over(drawn: list[DrawnFigure], tmp_path: Path) -> None:
    losses = np.linspace(5.0, 4.0, 30)
    losses[20] = np.nan
    arms = {"arm_0": {1: losses}, "arm_1": {1: losses + 3.0}, "arm_2": {1: np.full(30, np.nan)}}
    plot_shuffle(arms, {}, [], study(), tmp_path / "f.png", held_out=[], origin="ORIGIN")
    assert set(arms) <= set(drawn[0].labels)
    assert drawn[0].tops[0] > 7.5, "the arm with the highest loss is not cut"


@pytest.mark.slow
def test_without_blocks_there_is_no_panel_of_borders(drawn: list[DrawnFigure], tmp_path: Path) -> None:
    plot_shuffle(LOSSES, {arm: {} for arm in LOSSES}, [], study(), tmp_path / "f.png", held_out=[], origin="ORIGIN")
    assert drawn[0].titles == ("Loss by order of training",)
    assert "borders" not in drawn[0].footer
