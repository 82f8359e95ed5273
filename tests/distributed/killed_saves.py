"""Saves a checkpoint on real processes and kills one of them just before any chosen change of the file system.

The engine here writes as DeepSpeed does (plain files under final names, no flush) but starts in a fraction of a
second, so that every border can be tried.
"""

import os
import pathlib
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forked_ranks import fork_context

from evenpack.data.order.step_shape import CostWeights
from evenpack.engine.checkpoints.background import BackgroundWriter
from evenpack.engine.checkpoints.files import TrainState
from evenpack.engine.checkpoints.loading import newest_whole
from evenpack.engine.checkpoints.saving import CheckpointWriter, KeepPolicy
from evenpack.engine.world.distributed import World

BORDERS = ("mkdir", "write", "fsync", "rename", "replace", "link", "unlink", "rmdir")
"""Every call of `os` by which a save changes the file system, and `write` where the engine says that it wrote."""

SOLO = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
OLD, NEW = b"old" * 1000, b"new" * 1000

_NOWHERE = os.open(os.devnull, os.O_WRONLY)


def train_state(step: int, *, world_size: int, zero_stage: int = 0) -> TrainState:
    return TrainState(
        step=step,
        fingerprint="f" * 32,
        world_size=world_size,
        zero_stage=zero_stage,
        cost_weights=CostWeights(per_token=1.0, per_squared_length=0.1 + 0.2, per_segment=0.0),
        config={"run": {"name": "test"}},
        samples=0,
        reached_accuracy=None,
    )


class PlainFiles:
    """Writes a file as DeepSpeed's checkpoint engine does, in two pieces."""

    def save(self, state_dict: bytearray, path: str) -> None:
        with Path(path).open("wb") as file:
            for half in (state_dict[:1000], state_dict[1000:]):
                file.write(half)
                file.flush()
                os.write(_NOWHERE, half)  # a border


class PlainEngine:
    """Writes `content` into a file of rank 0 and one of each rank."""

    def __init__(self, world: World, content: bytes) -> None:
        self.world = world
        self.content = bytearray(content)
        self.optimizer = None
        self.checkpoint_engine = PlainFiles()

    def zero_optimization_stage(self) -> int:
        return 0

    def _copy_recovery_script(self, save_path: str) -> None:
        raise NotImplementedError

    def save_checkpoint(self, save_dir: str, *, tag: str, client_state: dict[str, Any], save_latest: bool) -> None:
        assert not save_latest
        names = [f"optimizer_{self.world.rank}.pt"] + ["model.pt"] * self.world.is_main
        for name in names:
            self.checkpoint_engine.save(self.content, path=str(Path(save_dir) / tag / name))
        self.world.barrier()

    def load_checkpoint(self, load_dir: str, *, tag: str) -> tuple[str | None, Any]:
        raise NotImplementedError


def count_borders(kill_at: int | None, *, number: signal.Signals = signal.SIGKILL) -> list[str]:
    """Kills this process right before its `kill_at`-th border, or sends it another signal.

    Returns the list that grows as borders are crossed.
    """
    crossed: list[str] = []

    def watched(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watching(*arguments: Any, **options: Any) -> Any:
            crossed.append(name)
            if len(crossed) - 1 == kill_at:
                os.kill(os.getpid(), number)
            return call(*arguments, **options)

        return watching

    for name in BORDERS:
        setattr(os, name, watched(name, getattr(os, name)))
    open_unwatched, open_watched = pathlib.Path.open, watched("open", pathlib.Path.open)
    pathlib.Path.open = lambda path, mode="r", *arguments, **options: (
        open_unwatched if mode in ("r", "rb") else open_watched
    )(path, mode, *arguments, **options)
    return crossed


def save_and_die(
    *,
    rank: int,
    ranks: int,
    directory: Path,
    step: int,
    content: bytes,
    in_background: bool,
    kill_at: int | None,
    answer: Any,
) -> None:
    """Saves one checkpoint on one rank; returns the number of its borders if the rank survives.

    In the background: the content changes as soon as the save has begun.
    """
    said = os.open(f"{directory}.rank_{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(said, 2)
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{directory}.meeting", rank=rank, world_size=ranks)
    world = World(rank=rank, size=ranks, local_rank=rank, device=torch.device("cpu"))
    writer = CheckpointWriter(directory, world, KeepPolicy(newest=1))
    crossed = count_borders(kill_at)
    engine, state = PlainEngine(world, content), train_state(step, world_size=ranks)
    if in_background:
        background = BackgroundWriter(writer)
        background.begin(engine, state)
        engine.content[:] = b"later" * 1000
        background.finish()
    else:
        writer.save(engine, state)
    answer.send(len(crossed))
    os._exit(0)


def run_save(
    directory: Path,
    step: int,
    content: bytes,
    *,
    ranks: int,
    watched_rank: int,
    kill_at: int | None,
    in_background: bool = False,
) -> int:
    """Runs one save; once the watched rank is dead the others are killed, as a launcher does.

    Returns the borders that the watched rank crossed, 0 if it was killed.
    """
    context = fork_context()
    processes, answers = [], []
    for rank in range(ranks):
        here, there = context.Pipe(duplex=False)
        options = {"rank": rank, "ranks": ranks, "directory": directory, "step": step, "content": content}
        options |= {
            "in_background": in_background,
            "kill_at": kill_at if rank == watched_rank else None,
            "answer": there,
        }
        process = context.Process(target=save_and_die, kwargs=options)
        process.start()
        there.close()
        processes.append(process)
        answers.append(here)
    watched = processes[watched_rank]
    watched.join(600)
    for process in processes:
        if watched.exitcode != 0:
            process.kill()
        process.join(600)
    said = Path(f"{directory}.rank_{watched_rank}").read_text()
    assert watched.exitcode in (0, -signal.SIGKILL), said
    return answers[watched_rank].recv() if watched.exitcode == 0 else 0


def assert_whole_and_usable(directory: Path, *, old_step: int, new_step: int) -> bytes:
    """Checks that there is a whole checkpoint, old or new, and that saving works again; returns which one it is."""
    found = newest_whole(directory, SOLO)
    assert found is not None
    contents = {(found.path / record.name).read_bytes() for record in found.files}
    assert len(contents) == 1
    content = contents.pop()
    if old_step != new_step:
        assert found.step == {OLD: old_step, NEW: new_step}[content]
    writer = CheckpointWriter(directory, SOLO, KeepPolicy(newest=1))
    writer.save(PlainEngine(SOLO, b"next"), train_state(new_step + 1, world_size=1))
    next_name = f"step_{new_step + 1:06d}"
    assert sorted(path.name for path in directory.iterdir()) == ["latest", next_name]
    return content


def kill_everywhere(
    tmp_path: Path, *, old_step: int, new_step: int, ranks: int, watched_rank: int, in_background: bool = False
) -> dict[bytes, int]:
    """Kills a save before its first, second, ... border until it succeeds; counts the checkpoints found afterwards."""
    start = tmp_path / "start"
    run_save(start, old_step, OLD, ranks=ranks, watched_rank=0, kill_at=None)
    found = {OLD: 0, NEW: 0}
    kill_at, borders = 0, 0
    while not borders:
        directory = tmp_path / f"kill_{kill_at}"
        shutil.copytree(start, directory)
        borders = run_save(
            directory,
            new_step,
            NEW,
            ranks=ranks,
            watched_rank=watched_rank,
            kill_at=kill_at,
            in_background=in_background,
        )
        assert borders in (0, kill_at)
        content = assert_whole_and_usable(directory, old_step=old_step, new_step=new_step)
        assert not borders or content == NEW
        found[content] += 1
        kill_at += 1
    return found
