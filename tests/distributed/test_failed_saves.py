"""A checkpoint that one rank cannot write: the run goes on with a warning, and the older checkpoint is whole."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from forked_ranks import run_ranks
from tiny_training import beside, changed, checkpoints, logged, never, numbered_lines, prepare_run, records

from evenpack.engine.config import RunConfig
from evenpack.engine.train import train_in
from evenpack.engine.world.distributed import World
from evenpack.errors import SaveError

STEPS = 4


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    texts = {"lines": numbered_lines()}
    folder = tmp_path_factory.mktemp("failed_saves")
    return prepare_run(folder, texts, steps=STEPS, checkpoint_every_steps=1, keep_checkpoints=STEPS)


def train_on_a_full_disk(world: World, config: RunConfig, full_at: int, writer: int) -> tuple[str | None, list[str]]:
    """Trains while the disk of one rank is full at the save after a step; returns the error and rank 0's warnings."""
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    save = TorchCheckpointEngine.save

    def save_unless_full(self: Any, state_dict: Any, path: str) -> None:
        if Path(path).resolve().parent.name.startswith(f".step_{full_at:06d}.") and world.rank == writer:
            Path(path).write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(self, state_dict, path)

    error = None
    with pytest.MonkeyPatch.context() as patch, logged("evenpack.engine.parts.saves") as said:
        patch.setattr(TorchCheckpointEngine, "save", save_unless_full)
        try:
            train_in(world, config, stop_requested=never)
        except SaveError as raised:
            error = str(raised)
    return error, [message for message in said if "has no checkpoint" in message]


def train_each(world: World, runs: dict[str, tuple[RunConfig, int, int]]) -> dict[str, tuple[str | None, list[str]]]:
    return {name: train_on_a_full_disk(world, *given) for name, given in runs.items()}


Ended = tuple[dict[str, RunConfig], list[dict[str, tuple[str | None, list[str]]]]]


@pytest.fixture(scope="module")
def ended(config: RunConfig) -> Ended:
    """Returns the runs by name, and the error and rank 0's warnings of each on each rank."""
    cases = {"background": (0, 2, True), "foreground": (1, 2, False), "last": (1, STEPS, True)}
    runs = {
        name: beside(
            config,
            name,
            training={"checkpoint_in_background": in_background},
            deepspeed={"zero_stage": stage},
        )
        for name, (stage, _, in_background) in cases.items()
    }
    full = {name: (runs[name], full_at, writer) for name, (writer, full_at, _) in cases.items()}
    return runs, run_ranks(train_each, 2, full)


@pytest.mark.parametrize(("name", "writer"), [("background", 0), ("foreground", 1)])
def test_a_save_that_fails_on_one_rank_leaves_the_run_going(ended: Ended, name: str, writer: int) -> None:
    run, results = ended[0][name], [of_rank[name] for of_rank in ended[1]]
    assert [error for error, _ in results] == [None, None]
    (warning,) = results[0][1]
    assert warning.startswith("step 2 has no checkpoint, and the run goes on without it: ")
    assert f"rank {writer} on " in warning
    assert "No space left on device" in warning
    assert results[1][1] == []
    assert checkpoints(run.run.output_dir) == ["latest", "step_000001", "step_000003", "step_000004"]
    assert [record["step"] for record in records(run)] == [1, 2, 3, 4]
    (failed,) = (record["checkpoint"] for record in records(run) if "failed" in record.get("checkpoint", {}))
    assert (failed["step"], failed["failed"]) == (2, 1)
    assert failed.keys() == {"step", "pause_seconds", "failed"}


def test_the_last_save_must_succeed(ended: Ended) -> None:
    (first, _), (second, _) = (of_rank["last"] for of_rank in ended[1])
    assert first == second
    assert first is not None
    assert "No space left on device" in first
    assert checkpoints(ended[0]["last"].run.output_dir) == ["latest", "step_000001", "step_000002", "step_000003"]


def train_without_latest(world: World, config: RunConfig) -> None:
    """Trains on a disk that has no room for the file `latest` once the first checkpoint is there."""
    from evenpack.engine.checkpoints import saving

    def write_text(path: Path, text: str, **_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path), text)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "write_text", write_text)
        train_in(world, config, stop_requested=never)


def test_a_complete_checkpoint_counts_without_the_file_that_names_it(config: RunConfig, tmp_path: Path) -> None:
    run = changed(config, run={"output_dir": tmp_path}, training={"keep_checkpoints": 1})
    run_ranks(train_without_latest, 1, run)
    assert checkpoints(run.run.output_dir) == [f"step_{STEPS:06d}"]
