"""Which checkpoints are kept: the newest, and those of named steps; never fewer than one."""

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from run_files import run_config, run_values
from test_checkpoint_files import FileEngine, names, train_state

from evenpack.engine.checkpoints.files import Checkpoint
from evenpack.engine.checkpoints.keeping import KeepPolicy
from evenpack.engine.checkpoints.saving import CheckpointWriter
from evenpack.engine.world.distributed import World
from evenpack.errors import ConfigError

SOLO = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))


def kept(*steps: int, newest: int = 1, named: frozenset[int] = frozenset()) -> list[int]:
    policy = KeepPolicy(newest=newest, steps=named)
    whole = [Checkpoint(path=Path(f"step_{n:06d}"), state=train_state(n), files=(), saved_at=0.0) for n in steps]
    return [one.step for one in policy.kept(whole)]


def test_the_newest_are_kept_whatever_else_is():
    assert kept(3, 1, 2, newest=2) == [2, 3]
    assert kept(1, newest=2) == [1]


def test_those_of_named_steps_are_kept_for_ever():
    assert kept(*range(1, 7), named=frozenset({2, 4, 9})) == [2, 4, 6]


def test_a_policy_that_keeps_nothing_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        KeepPolicy(newest=0)
    with pytest.raises(ConfigError, match=r"(?s)training.keep_checkpoints.*greater than or equal to 1"):
        run_config(run_values("gpt2", Path("nowhere"), training={"keep_checkpoints": 0}))


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


@pytest.mark.parametrize("unreadable", ["manifest.json", "mp_rank_00_model_states.pt"])
def test_a_disk_that_does_not_answer_at_a_save_costs_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unreadable: str
):
    save(tmp_path, 1, 2)
    stat, read = Path.stat, Path.read_bytes

    def refuse(path: Path) -> None:
        if path.name == unreadable and path.parent.name.startswith("step_"):
            raise OSError(errno.EIO, "Input/output error")

    def refused_stat(path: Path, **options: Any) -> Any:
        refuse(path)
        return stat(path, **options)

    def refused_read(path: Path) -> bytes:
        refuse(path)
        return read(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", refused_stat)
        patch.setattr(Path, "read_bytes", refused_read)
        save(tmp_path, 3)
    assert names(tmp_path) == ["latest", "step_000002", "step_000003"]
