"""The parent's checkpoint becomes the first of a forked run, by links or copies, and names the parent."""

import errno
import os
from pathlib import Path

import pytest
from run_files import pair_run_values, run_config
from test_checkpoint_files import SOLO, FileEngine, train_state

from evenpack.engine.checkpoints.files import Checkpoint, read_manifest
from evenpack.engine.checkpoints.forks import checkpoint_of, parent_checkpoint, take_over
from evenpack.engine.checkpoints.loading import newest_whole
from evenpack.engine.checkpoints.saving import CheckpointWriter, KeepPolicy
from evenpack.engine.config import ParentSection
from evenpack.errors import CheckpointError, ConfigError


@pytest.fixture
def parent(tmp_path: Path) -> ParentSection:
    writer = CheckpointWriter(tmp_path / "trunk" / "checkpoints", SOLO, KeepPolicy(newest=1, steps=frozenset({2})))
    for step in (1, 2, 3):
        writer.save(FileEngine(), train_state(step))
    return ParentSection(run=tmp_path / "trunk", step=2)


def saved(checkpoint: Checkpoint) -> list[Path]:
    return [checkpoint.path / record.name for record in checkpoint.files]


def other_disk(source: Path, target: Path) -> None:
    raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(source), None, str(target))


def test_the_files_are_the_parents_own_and_stay_when_the_parent_goes(parent: ParentSection, tmp_path: Path):
    found = checkpoint_of(parent)
    own = take_over(found, tmp_path / "child")
    assert all(one.samefile(other) for one, other in zip(saved(found), saved(own), strict=True))
    (tmp_path / "trunk").rename(tmp_path / "moved")
    assert newest_whole(tmp_path / "child" / "checkpoints", SOLO) == own
    assert own.state.config["run"]["parent"] == {"run": str(tmp_path / "trunk"), "step": 2}
    assert "parent" not in read_manifest(tmp_path / "moved" / "checkpoints" / "step_000002").state.config["run"]
    assert (own.path.parent / "latest").read_text() == "step_000002\n"


def test_a_file_that_was_moved_to_another_disk_is_held_by_its_content(parent: ParentSection, tmp_path: Path):
    found = checkpoint_of(parent)
    moved = saved(found)[0].rename(tmp_path / "elsewhere")
    saved(found)[0].symlink_to(os.path.relpath(moved, found.path))
    own = take_over(found, tmp_path / "child")
    moved.unlink()
    assert newest_whole(own.path.parent, SOLO) == own


def test_without_hard_links_the_files_are_copied(
    parent: ParentSection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(os, "link", other_disk)
    found = checkpoint_of(parent)
    own = take_over(found, tmp_path / "child")
    assert not any(one.samefile(other) for one, other in zip(saved(found), saved(own), strict=True))
    assert newest_whole(own.path.parent, SOLO) == own


@pytest.mark.parametrize("links", [True, False])
def test_a_parent_that_loses_the_checkpoint_meanwhile_leaves_nothing(
    parent: ParentSection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
):
    if not links:
        monkeypatch.setattr(os, "link", other_disk)
    found = checkpoint_of(parent)
    saved(found)[-1].unlink()
    with pytest.raises(CheckpointError, match=r"was removed while it was taken over: .*keep_checkpoint_steps"):
        take_over(found, tmp_path / "child")
    assert list((tmp_path / "child").rglob("*")) == [tmp_path / "child" / "checkpoints"]


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ("trunk", r"no complete checkpoint of step 2 .*it has those of steps 3: name"),
        ("trunk/checkpoints", "checkpoints/checkpoints has none"),
        ("gone", "gone does not exist"),
    ],
)
def test_a_step_without_a_complete_checkpoint_is_refused_with_those_there_are(
    parent: ParentSection, tmp_path: Path, run: str, message: str
):
    saved(checkpoint_of(parent))[0].write_bytes(b"short")
    with pytest.raises(CheckpointError, match=message):
        checkpoint_of(ParentSection(run=tmp_path / run, step=2))


def test_an_mlperf_log_does_not_begin_in_mid_run(parent: ParentSection, tmp_path: Path):
    values = pair_run_values(
        "bert",
        tmp_path,
        run={"parent": parent.model_dump()},
        data={"validation_fraction": 0.1},
        training={"target_accuracy": 0.7, "evaluate_every_steps": 2},
    )
    values["mlperf"] = {"submission_platform": "1xCPU", "submission_benchmark": "bert"}
    with pytest.raises(ConfigError, match="begins after step 2 of another: set mlperf=null"):
        parent_checkpoint(run_config(values))
    del values["mlperf"]
    assert parent_checkpoint(run_config(values)).step == 2
