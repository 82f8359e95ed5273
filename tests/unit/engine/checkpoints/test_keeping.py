"""Which checkpoints are kept: the newest, and those of named steps; never fewer than one."""

from pathlib import Path

import pytest
from test_checkpoint_files import SOLO, FileEngine, names, train_state

from evenpack.engine.checkpoints.files import Checkpoint
from evenpack.engine.checkpoints.saving import CheckpointWriter, KeepPolicy


def test_those_of_named_steps_are_kept_for_ever():
    policy = KeepPolicy(newest=1, steps=frozenset({2, 4, 9}))
    whole = [Checkpoint(path=Path(f"{n}"), state=train_state(n), files=()) for n in range(1, 7)]
    assert [one.step for one in policy.kept(whole)] == [2, 4, 6]
    with pytest.raises(ValueError, match="at least 1"):
        KeepPolicy(newest=0)


def save(directory: Path, *steps: int, named: frozenset[int] = frozenset()) -> None:
    writer = CheckpointWriter(directory, SOLO, KeepPolicy(newest=1, steps=named))
    for step in steps:
        writer.save(FileEngine(), train_state(step))


def test_a_named_one_stays_on_disk_while_newer_ones_come_and_go(tmp_path: Path):
    save(tmp_path, 1, 2, 3, 4, named=frozenset({2}))
    assert names(tmp_path) == ["latest", "step_000002", "step_000004"]


def test_one_that_a_kill_left_under_a_hidden_name_is_not_kept_once_another_is_whole(tmp_path: Path):
    save(tmp_path, 1)
    (tmp_path / "step_000001").rename(tmp_path / ".step_000001.replaced")
    save(tmp_path, 2)
    assert names(tmp_path) == ["latest", "step_000002"]
