"""Skipped steps may be changed for future steps only."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from run_files import changed, run_config, run_values
from test_checkpoint_files import train_state

from evenpack.engine.checkpoints.continuation import compare_run_files
from evenpack.engine.checkpoints.files import TrainState
from evenpack.engine.config import RunConfig
from evenpack.errors import CheckpointError, ConfigError

Entries = list[Any]


def skipping(entries: Entries) -> RunConfig:
    return run_config(run_values("gpt2", Path("runs"), training={"steps": 100, "skip_steps": entries}))


def state_at(step: int, config: RunConfig) -> TrainState:
    return replace(train_state(step), config=config.model_dump(mode="json"))


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ([], [41, [50, 60]]),
        ([[10, 20], 41, 99], [[10, 20]]),
        ([[10, 20], 30], [[10, 15], [16, 20], 30]),
        ([[35, 45]], [[35, 40], 90]),
    ],
)
def test_later_steps_may_be_named_and_taken_out(before: Entries, now: Entries):
    compare_run_files(state_at(40, skipping(before)), skipping(now).model_dump(mode="json"))


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        ([], [40], "named now, but trained on already: 40$"),
        ([5], [5, [38, 45]], "named now, but trained on already: 38 to 40$"),
        ([[10, 20]], [[10, 12]], "skipped already, but not named now: 13 to 20$"),
        ([3], [4], "trained on already: 4\n.*skipped already, but not named now: 3$"),
    ],
)
def test_steps_that_are_done_stay_as_they_were(before: Entries, now: Entries, told: str):
    with pytest.raises(CheckpointError, match=f"(?m)^step 40 is reached(.|\n)*{told}"):
        compare_run_files(state_at(40, skipping(before)), skipping(now).model_dump(mode="json"))


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        ([[6, 4]], r"\[6, 4\] is neither a step nor a span of steps"),
        ([0], "0 is neither a step"),
        ([True], "training: skip_steps takes numbers, found true"),
        ([[1, 2, 3]], r"\[1, 2, 3\] is neither a step"),
        ([[1, 1.5]], r"\[1, 1.5\] is neither a step"),
        (5, "expected a list, found 5"),
        ([101], r"names step 101, above training.steps \(100\)"),
        ([[1, 100]], "leaves none of the 100 steps"),
    ],
)
def test_what_names_no_steps_of_the_run_is_refused(entries: Any, told: str):
    with pytest.raises(ConfigError, match=told):
        skipping(entries)


def test_a_run_file_that_is_written_out_names_the_same_steps():
    config = skipping([[50, 60], 7])
    again = run_config(config.model_dump(mode="json"))
    assert again.training.skipped == config.training.skipped
    assert changed(config).training.skip_steps == config.training.skip_steps
