"""Checkpoints written in the background: the same bytes as in the foreground, whole or absent at any kill."""

import errno
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from forked_ranks import run_ranks
from killed_saves import NEW, OLD, PlainEngine, kill_everywhere, train_state
from test_checkpoint import batch_of, training_engine

from evenpack.engine.checkpoints.background import BackgroundWriter, RankReport
from evenpack.engine.checkpoints.files import Checkpoint
from evenpack.engine.checkpoints.loading import newest_whole
from evenpack.engine.checkpoints.saving import CheckpointWriter, KeepPolicy
from evenpack.engine.world.distributed import World
from evenpack.errors import SaveError

STAGES = (0, 1, 3)
"""2 has the files of 1."""


def test_a_rank_killed_before_any_write_leaves_a_whole_checkpoint(tmp_path: Path):
    found = kill_everywhere(tmp_path, old_step=1, new_step=2, ranks=1, watched_rank=0, in_background=True)
    assert found[OLD] > 10
    assert found[NEW] > 8


def test_another_rank_killed_before_any_write_leaves_a_whole_checkpoint(tmp_path: Path):
    found = kill_everywhere(tmp_path, old_step=1, new_step=2, ranks=2, watched_rank=1, in_background=True)
    assert found[OLD] > 5  # its file, and the report of it


@pytest.mark.slow
def test_rank_0_killed_while_others_write_leaves_a_whole_checkpoint(tmp_path: Path):
    found = kill_everywhere(tmp_path, old_step=1, new_step=2, ranks=2, watched_rank=0, in_background=True)
    assert found[OLD] > 10
    assert found[NEW] > 8


def checksums(checkpoint: Checkpoint) -> dict[str, str]:
    return {record.name: record.checksum for record in checkpoint.files}


def save_both_ways(world: World, directory: Path, stage: int) -> tuple[dict[str, str], dict[str, str], list[int]]:
    """Saves one state in the foreground, and in the background, where a step ends before anything is written.

    Returns the checksums of both, and the ranks that left a report.
    """
    places = [directory / f"{way}_{stage}" for way in ("foreground", "background")]
    writers = [CheckpointWriter(place, world, KeepPolicy(newest=1)) for place in places]
    background = BackgroundWriter(writers[1])
    engine = training_engine(world, zero_stage=stage)
    first = world.rank * engine.micro_batches
    micro_batches = [batch_of(0, first + index) for index in range(engine.micro_batches)]
    engine.train_step(0, micro_batches)
    state = train_state(1, world_size=world.size, zero_stage=stage)
    in_foreground = writers[0].save(engine.deepspeed, state)
    reported = []
    read = RankReport.read
    RankReport.read = classmethod(lambda _, path: reported.append(int(path.stem[-1])) or read(path))  # type: ignore
    files, trained = engine.deepspeed.checkpoint_engine.files, threading.Event()
    write = files.save
    files.save = lambda state_dict, path: trained.wait(60) and write(state_dict, path)
    background.begin(engine.deepspeed, state)
    engine.train_step(1, micro_batches)
    trained.set()
    background.finish()
    RankReport.read = read  # type: ignore[method-assign]
    in_background = newest_whole(places[1], world)
    assert in_background is not None
    return checksums(in_foreground), checksums(in_background), reported


def priority() -> int:
    """Returns the priority of this thread; a higher number is a lower one."""
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


class SlowFiles:
    """Writes a file only when it is time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.priority: int | None = None

    def save(self, state_dict: bytearray, path: str) -> None:
        self.priority = priority()
        time.sleep(self.seconds)
        Path(path).write_bytes(state_dict)


def plain_engine(world: World, *, seconds: float = 0.0) -> PlainEngine:
    engine = PlainEngine(world, NEW)
    engine.checkpoint_engine = SlowFiles(seconds)
    return engine


def save_without_a_report(world: World, directory: Path) -> list[str]:
    """Saves on ranks of which one writes and cannot report it, and then cannot write either; returns the results."""
    background = BackgroundWriter(CheckpointWriter(directory / "without_report", world, KeepPolicy(newest=3)))

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    results: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            patch.setattr(RankReport, "write", fail)
        for step in (1, 2, 3):
            engine = plain_engine(world)
            if world.rank == 1 and step == 2:
                engine.checkpoint_engine.save = fail  # type: ignore[method-assign]
            background.begin(engine, train_state(step, world_size=world.size))
            background.finish()
            ended = background.ended()
            if ended is not None:
                failed = isinstance(ended.result, SaveError)
                results.append(str(ended.result) if failed else f"step {ended.result.step}")
                results.append(" ".join(sorted(path.name for path in (directory / "without_report").iterdir())))
            assert background.ended() is None
    return results


def wait_alone(world: World, directory: Path) -> list[int | None]:
    """Returns the newest step after a wait that is too short, and after one that is not."""
    background = BackgroundWriter(CheckpointWriter(directory / "alone", world, KeepPolicy(newest=1)))
    background.begin(plain_engine(world, seconds=0.3), train_state(1, world_size=world.size))
    newest = []
    for seconds in (0.0, 60.0):
        background.wait_alone(seconds=seconds)
        world.barrier()
        found = newest_whole(directory / "alone", world)
        newest.append(None if found is None else found.step)
    return newest


def save_with_a_thread_that_dies(world: World, directory: Path) -> str:
    """Returns what rank 0 learns of a save whose thread has died on rank 1 of something that nobody expects."""
    background = BackgroundWriter(CheckpointWriter(directory / "died", world, KeepPolicy(newest=1)))
    engine = plain_engine(world)
    if world.rank == 1:
        engine.checkpoint_engine.save = lambda *_: {}["nothing"]
    background.begin(engine, train_state(1, world_size=world.size))
    if world.rank == 1:
        with pytest.raises(KeyError, match="nothing"):
            background.finish()
        return "died"
    background.wait_alone(seconds=20.0)
    ended = background.ended()
    return "waits" if ended is None else str(ended.result)


def priorities(world: World, directory: Path) -> tuple[int, int]:
    """Returns the priorities of the thread that writes and of the one that trains."""
    engine = plain_engine(world)
    background = BackgroundWriter(CheckpointWriter(directory / "priorities", world, KeepPolicy(newest=1)))
    background.begin(engine, train_state(1, world_size=world.size))
    background.finish()
    return engine.checkpoint_engine.files.priority, priority()


def save_on_two_ranks(world: World, directory: Path) -> dict[str, Any]:
    return {
        **{f"stage_{stage}": save_both_ways(world, directory, stage) for stage in STAGES},
        "without_report": save_without_a_report(world, directory),
        "alone": wait_alone(world, directory),
        "priorities": priorities(world, directory),
        "died": save_with_a_thread_that_dies(world, directory),
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    directory = tmp_path_factory.mktemp("background")
    return directory, run_ranks(save_on_two_ranks, 2, directory)


@pytest.mark.parametrize("stage", STAGES)
def test_a_background_save_writes_the_files_of_a_foreground_save(saved: tuple[Path, list[dict[str, Any]]], stage: int):
    for result in saved[1]:
        in_foreground, in_background, _ = result[f"stage_{stage}"]
        assert len(in_background) > 2 * (stage > 0)
        assert in_background == in_foreground


def test_rank_0_waits_only_for_ranks_that_write(saved: tuple[Path, list[dict[str, Any]]]):
    (_, _, replicated), (_, _, sharded) = (saved[1][0][f"stage_{stage}"] for stage in (0, 1))
    assert replicated == []
    assert set(sharded) <= {1}


def test_a_rank_that_cannot_leave_its_report_is_asked_at_the_end(saved: tuple[Path, list[dict[str, Any]]]):
    main, other = saved[1]
    first, _, second, left, third, _ = main["without_report"]
    assert (first, third) == ("step 1", "step 3")
    assert "rank 1 on " in second
    assert "No space left on device" in second
    assert left == "latest step_000001"  # and nothing of step 2
    assert other["without_report"] == []


def test_after_an_error_each_rank_waits_for_its_own_part(saved: tuple[Path, list[dict[str, Any]]]):
    assert [result["alone"] for result in saved[1]] == [[None, 1]] * 2


def test_rank_0_learns_that_the_thread_of_another_rank_has_died_and_waits_no_longer(
    saved: tuple[Path, list[dict[str, Any]]],
):
    assert [result["died"] for result in saved[1]] == [
        "rank 1 failed while saving a checkpoint: KeyError: 'nothing'",
        "died",
    ]
    assert list((saved[0] / "died").iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="priorities of threads are Linux's")
def test_the_thread_that_writes_gives_way_to_training(saved: tuple[Path, list[dict[str, Any]]]):
    for result in saved[1]:
        writing, training = result["priorities"]
        assert writing > training
