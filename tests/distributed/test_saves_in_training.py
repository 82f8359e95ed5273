"""Saves in the background of a run: what it waits for, what it records of them, and what an error leaves of them."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from forked_ranks import run_ranks
from noted_moves import noted_moves
from tiny_training import changed, checkpoints, logged, never, numbered_lines, prepare_run, stop_after

from evenpack.engine.activity import ACTIVITIES
from evenpack.engine.checkpoints.background import BackgroundWriter
from evenpack.engine.config import RunConfig
from evenpack.engine.reporting.metrics import read_metrics
from evenpack.engine.train import train_in
from evenpack.engine.world.distributed import World
from evenpack.errors import RunError

STEPS, EVERY = 7, 2


@contextmanager
def held_writes() -> Iterator[None]:
    """Holds every write in the background until the run waits for it."""
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    waited_for = threading.Event()
    save, begin = TorchCheckpointEngine.save, BackgroundWriter.begin

    def hold(self: Any, state_dict: Any, path: str) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert waited_for.wait(60)
        save(self, state_dict, path)

    def releasing(wait: Callable[..., None]) -> Callable[..., None]:
        def release(self: BackgroundWriter, *arguments: Any, **options: Any) -> None:
            if not self._is_over:
                waited_for.set()
            wait(self, *arguments, **options)

        return release

    def begin_holding(self: BackgroundWriter, *arguments: Any) -> None:
        self.finish()
        waited_for.clear()
        begin(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchCheckpointEngine, "save", hold)
        patch.setattr(BackgroundWriter, "finish", releasing(BackgroundWriter.finish))
        patch.setattr(BackgroundWriter, "wait_alone", releasing(BackgroundWriter.wait_alone))
        patch.setattr(BackgroundWriter, "begin", begin_holding)
        yield


def at_step(step: int, act: Callable[[], bool]) -> Callable[[], bool]:
    """Returns a `stop_requested` that acts at a step."""
    calls = []

    def ask() -> bool:
        calls.append(None)
        return act() if len(calls) == step else False

    return ask


def fail() -> bool:
    raise RunError("this step ends the run")


def train_while_writes_are_held(world: World, config: RunConfig) -> dict[str, Any]:
    """Trains to the end, until a stop, and until an error, each in a folder of its own; and in the foreground."""

    def run_in(name: str, **training: Any) -> RunConfig:
        return changed(config, run={"output_dir": config.run.output_dir / name}, training=training)

    with held_writes(), logged("evenpack.engine.parts.saves") as said:
        with noted_moves() as told:
            train_in(world, run_in("whole"), stop_requested=never)
        train_in(world, run_in("stopped"), stop_requested=stop_after(3))
        with pytest.raises(RunError, match="this step ends the run"):
            train_in(world, run_in("failed"), stop_requested=at_step(3, fail))
    train_in(world, run_in("foreground", checkpoint_in_background=False), stop_requested=never)
    return {"warnings": said, "told": [activity for activity, _ in told]}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    texts = {"lines": numbered_lines()}
    folder = tmp_path_factory.mktemp("held_saves")
    config = prepare_run(folder, texts, steps=STEPS, checkpoint_every_steps=EVERY, keep_checkpoints=STEPS)
    config = changed(config, deepspeed={"zero_stage": 1})
    return config.run.output_dir, run_ranks(train_while_writes_are_held, 2, config)


Runs = tuple[Path, list[dict[str, Any]]]


def saves(output_dir: Path) -> dict[int, dict[str, Any]]:
    """Returns what each step's record has of a save."""
    return {
        record["step"]: record["checkpoint"]
        for record in read_metrics(output_dir / "metrics.jsonl")
        if "checkpoint" in record
    }


def test_training_goes_on_during_a_save_and_the_next_save_waits_for_it(runs: Runs):
    output_dir, _ = runs
    assert checkpoints(output_dir / "whole") == ["latest", *(f"step_{step:06d}" for step in (2, 4, 6, 7))]
    assert {at: save["step"] for at, save in saves(output_dir / "whole").items()} == {5: 2, 7: 4}


def test_a_wait_for_the_save_before_is_a_warning_on_rank_0_once(runs: Runs):
    (first, *others), rest = runs[1][0]["warnings"], runs[1][1]["warnings"]
    assert first.startswith("the checkpoint of step 2 is still being written when that of step 4 is due")
    assert "training.checkpoint_every_steps (2)" in first
    assert others == rest == []


def test_a_rank_whose_own_part_is_on_disk_is_not_the_one_that_holds_up_a_save(runs: Runs):
    assert ACTIVITIES.index("waiting for a save") > ACTIVITIES.index("saving a checkpoint")
    for result in runs[1]:
        told = [activity for activity, _ in groupby(result["told"])]
        waits = [index for index, activity in enumerate(told) if activity == "waiting for a save"]
        assert len(waits) >= 3
        assert {told[index - 1] for index in waits} == {"saving a checkpoint"}
        assert {told[index + 1] for index in waits} == {"saving a checkpoint", "writing the summary"}


def test_a_stop_waits_for_the_save_in_flight_and_for_its_own(runs: Runs):
    assert checkpoints(runs[0] / "stopped") == ["latest", "step_000002", "step_000003"]


def test_an_error_that_ends_the_run_leaves_the_save_in_flight_whole(runs: Runs):
    assert checkpoints(runs[0] / "failed") == ["latest", "step_000002"]


def test_a_save_in_the_foreground_is_on_disk_when_the_next_step_begins(runs: Runs):
    found = saves(runs[0] / "foreground")
    assert {at: save["step"] for at, save in found.items()} == {3: 2, 5: 4, 7: 6}
    assert all(save["seconds"] == save["pause_seconds"] > 0 for save in found.values())


@pytest.mark.parametrize("name", ["whole", "foreground"])
def test_records_and_summary_have_the_cost_of_each_save(runs: Runs, name: str):
    output_dir = runs[0] / name
    found = saves(output_dir)
    for save in found.values():
        folder = output_dir / "checkpoints" / f"step_{save['step']:06d}"
        files = json.loads((folder / "manifest.json").read_text())["files"]
        assert save["bytes"] == sum(file["size"] for file in files) > 0
    total = json.loads((output_dir / "summary.json").read_text())["checkpoints"]
    assert (total["saved"], total["failed"]) == (4, 0)
    recorded = sum(save["pause_seconds"] for save in found.values())
    assert total["pause_seconds"] > recorded
    steps = sum(record["step_seconds"] for record in read_metrics(output_dir / "metrics.jsonl"))
    assert total["pause_share"] == pytest.approx(total["pause_seconds"] / (total["pause_seconds"] + steps))
