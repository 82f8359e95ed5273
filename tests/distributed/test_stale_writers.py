"""A rank 0 that is stopped at any border of a save, and woken after a newer run: the newer run loses nothing.

The newer run takes the directory where the file system has no locks; where it has them, it is refused.
"""

import errno
import fcntl
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from forked_ranks import fork_context
from killed_saves import NEW, OLD, SOLO, PlainEngine, count_borders, train_state

from evenpack.console import save_json
from evenpack.engine.checkpoints.background import BackgroundWriter
from evenpack.engine.checkpoints.files import CHECKPOINTS
from evenpack.engine.checkpoints.loading import newest_whole
from evenpack.engine.checkpoints.saving import CheckpointWriter, KeepPolicy
from evenpack.engine.ownership import WRITER, require_owned
from evenpack.engine.reporting.metrics import METRICS, MetricsLog, read_metrics
from evenpack.errors import RunError, SaveError
from evenpack.launcher.processes.holding import held_as_writer

LAST = 10


def refuse_locks(*_: Any) -> None:
    """Does what `flock` does on some network file systems."""
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def run_to(output_dir: Path, last: int, content: bytes, *, keep: int, in_background: bool = False) -> None:
    """Goes on from the newest checkpoint: records each step, saves every second one, and writes a summary."""
    checkpoints = output_dir / CHECKPOINTS
    found = newest_whole(checkpoints, SOLO)
    first = 0 if found is None else found.step
    writer = CheckpointWriter(checkpoints, SOLO, KeepPolicy(newest=keep), steps_done=first)
    background = BackgroundWriter(writer)
    with MetricsLog.resume(output_dir / METRICS, step=first) as log:
        for step in range(first + 1, last + 1):
            log.append({"step": step, "by": content.decode()[:3]})
            if step % 2 == 0:
                log.commit()
                if in_background:
                    background.begin(PlainEngine(SOLO, content), train_state(step, world_size=1))
                    background.finish()
                    ended = background.ended()
                    assert ended is not None
                    if isinstance(ended.result, SaveError):
                        raise ended.result
                else:
                    writer.save(PlainEngine(SOLO, content), train_state(step, world_size=1))
    save_json({"step": last}, output_dir / "summary.json", check=partial(require_owned, output_dir))


def be_stale(output_dir: Path, answer: Any, *, stop_at: int, in_background: bool) -> None:
    """Is stopped right before a border of its run to step 4; says how that ended."""
    os.dup2(os.open(f"{output_dir}.said", os.O_WRONLY | os.O_CREAT), 2)
    fcntl.flock = refuse_locks
    with held_as_writer(output_dir):
        answer.send("has it")
        crossed = count_borders(stop_at, number=signal.SIGSTOP)
        try:
            run_to(output_dir, 4, OLD, keep=1, in_background=in_background)
        except RunError as error:
            answer.send(str(error))
        else:
            answer.send(crossed)
    os._exit(0)


@contextmanager
def stale(output_dir: Path, stop_at: int, *, in_background: bool) -> Iterator[tuple[Any, Any]]:
    """Yields the process, once it is stopped or has ended, and what it says."""
    here, there = fork_context().Pipe(duplex=False)
    options = {"stop_at": stop_at, "in_background": in_background}
    process = fork_context().Process(target=be_stale, args=(output_dir, there), kwargs=options)
    process.start()
    there.close()
    try:
        assert here.recv() == "has it"
        while process.is_alive() and not is_stopped(process.pid):
            time.sleep(0.002)
        yield process, here
    finally:
        process.kill()
        process.join()


def is_stopped(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):  # it may end between two questions
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    return False


def content_of(output_dir: Path) -> dict[str, bytes]:
    """Returns all that counts: neither the claim nor unfinished files, which only take room."""
    files = (path for path in output_dir.rglob("*") if path.is_file())
    names = {path.relative_to(output_dir).as_posix(): path for path in files}
    return {name: path.read_bytes() for name, path in names.items() if ".partial" not in name and name != ".writer"}


@pytest.mark.parametrize(
    ("in_background", "every"),
    [
        (False, 4),
        *(pytest.param(in_background, 1, marks=pytest.mark.slow) for in_background in (False, True)),
    ],
)
def test_a_writer_that_is_woken_after_a_newer_run_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_background: bool, every: int
) -> None:
    monkeypatch.setattr(fcntl, "flock", refuse_locks)
    with held_as_writer(tmp_path / "start"):
        run_to(tmp_path / "start", 2, NEW, keep=9)
    shutil.copytree(tmp_path / "start", tmp_path / "not_stopped")
    with stale(tmp_path / "not_stopped", -1, in_background=in_background) as (_, answer):
        borders = answer.recv()
    refusals = 0
    for stop_at, border in list(enumerate(borders))[every - 1 :: every]:
        output_dir = tmp_path / f"stopped_{stop_at}"
        shutil.copytree(tmp_path / "start", output_dir)
        with stale(output_dir, stop_at, in_background=in_background) as (process, answer):
            with held_as_writer(output_dir):
                run_to(output_dir, LAST, NEW, keep=9)
            after = content_of(output_dir)
            os.kill(process.pid, signal.SIGCONT)
            refusals += isinstance(answer.recv(), str)
            process.join(60)
            assert process.exitcode == 0
        left = content_of(output_dir)
        if border == "replace":  # after the claim was read: nobody can take that back
            after |= {name: left[name] for name in (METRICS, "summary.json")}
        else:
            assert [record["step"] for record in read_metrics(output_dir / METRICS)] == list(range(1, LAST + 1))
        assert left == after, f"stopped at border {stop_at}, {border}"
        newest = newest_whole(output_dir / CHECKPOINTS, SOLO)
        assert newest is not None
        assert newest.step == LAST
        assert (output_dir / CHECKPOINTS / "latest").read_text() == f"step_{LAST:06d}\n"
    assert len(borders) > 40
    assert borders.count("replace") < 9
    assert refusals > len(borders) // every - 5  # the last ones are those of the summary


@pytest.mark.parametrize("is_claimed_after", [True, False])
def test_a_renaming_is_undone_unless_the_newer_start_has_found_its_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_claimed_after: bool
) -> None:
    output_dir, rename = tmp_path / "out", Path.rename

    def rename_and_lose(path: Path, target: Path) -> Path:
        renamed = rename(path, target)
        if target.name == "step_000004" and not (output_dir / "taken").exists():
            (output_dir / "taken").touch()
            (output_dir / WRITER).write_text("of a newer start")
            moment = time.time() + (60 if is_claimed_after else -60)
            os.utime(output_dir / WRITER, (moment, moment))
        return renamed

    with held_as_writer(output_dir):
        run_to(output_dir, 2, OLD, keep=9)
        monkeypatch.setattr(Path, "rename", rename_and_lose)
        with pytest.raises(RunError, match="another start of the run has taken"):
            run_to(output_dir, 4, OLD, keep=9)
    assert (output_dir / CHECKPOINTS / "step_000004").exists() == is_claimed_after
