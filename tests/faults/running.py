"""Faults of a run that is on."""

import json
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Literal

import psutil
import yaml

from evenpack.worker_pool import is_resource_tracker
from faults import subject
from faults.disks import fill
from faults.life import Life
from faults.subject import SubjectRun, listed, paths_below
from faults.tried import BrokenError, MissedError

Ends = Literal["must", "may", "never"]
"""Whether a run ends by a fault: it must (clearly), it may (clearly) or go on, or it must go on."""


A_FILE_DELETED = "a file is deleted under the run"


@dataclass(frozen=True, kw_only=True)
class Injected:
    """A fault that has happened."""

    detail: str
    undo: Callable[[], None] | None = None
    """Takes its cause away, for a run that goes on and for the same command afterwards."""
    hold_seconds: float = 0.0
    """How long the cause stays, if the run does not end before."""
    may_return_0: bool = False
    """Whether the exit code is DeepSpeed's own affair: `deepspeed` returns 0 if a signal ends what it has started."""
    says: str | None = None
    """Regular expression of what the run must say as it ends; None: anything."""
    nobody_is_left: bool = False
    """Whether no process lives that would say something: `deepspeed` itself is asked for critical messages alone."""


@dataclass(frozen=True, kw_only=True)
class RunningFault:
    """A fault of a run that is on."""

    name: str
    ends: Ends
    inject: Callable[[Life, Random], Injected]
    fits: Callable[[SubjectRun], bool] = lambda _: True
    costs_start: bool = False
    """Whether the run has to be started again, or another one once: it is drawn less often."""
    asks_to_save: bool = False
    """Whether a run that trains must save, and end with the code for it; `deepspeed` and `torchrun` have others."""
    silent: bool = False
    """Whether the process that is killed is the one that would have said something."""


def _alone(run: SubjectRun) -> bool:
    return run.case.ranks == 1


def _together(run: SubjectRun) -> bool:
    return run.case.ranks > 1


def _on_small_disk(run: SubjectRun) -> bool:
    return "small_disk" in run.folder.parts


def _one_rank(life: Life, random: Random) -> tuple[int, psutil.Process]:
    ranks = life.ranks()
    if not ranks:
        raise MissedError
    index = random.randrange(len(ranks))
    return index, ranks[index]


def _send(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess as error:
        raise MissedError from error


def _go_on(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGCONT)


def _command(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):
        return list(process.cmdline())
    return []


def kill_a_rank(life: Life, random: Random) -> Injected:
    rank, process = _one_rank(life, random)
    _send(process, signal.SIGKILL)
    return Injected(detail=f"rank {rank}")


def kill_all_ranks(life: Life, _random: Random) -> Injected:
    ranks = life.ranks()
    if not ranks:
        raise MissedError
    for process in ranks:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    return Injected(detail=f"{len(ranks)} ranks", nobody_is_left=life.run.case.stack == "deepspeed")


def kill_a_launcher(life: Life, random: Random) -> Injected:
    launchers = life.launchers()
    if not launchers:
        raise MissedError
    index = random.randrange(len(launchers))
    _send(launchers[index], signal.SIGKILL)
    may_return_0 = life.run.case.stack == "deepspeed" and index > 0
    more = ", so that `deepspeed` returns 0" if may_return_0 else ""
    return Injected(detail=f"launcher {index} of {len(launchers)}{more}", may_return_0=may_return_0)


def kill_a_loader(life: Life, random: Random) -> Injected:
    _, rank = _one_rank(life, random)
    with suppress(psutil.NoSuchProcess):
        children = [one for one in rank.children() if "spawn_main" in " ".join(_command(one))]
        if children:
            _send(random.choice(children), signal.SIGKILL)
            return Injected(detail="a loader's worker")
    raise MissedError


def kill_a_resource_tracker(life: Life, random: Random) -> Injected:
    found = [one for one in life.living() if is_resource_tracker(_command(one))]
    if not found:
        raise MissedError
    _send(random.choice(found), signal.SIGKILL)
    return Injected(detail=f"one of {len(found)}")


def ask_to_stop(life: Life, random: Random) -> Injected:
    number = random.choice((signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
    _send(psutil.Process(life.process.pid), number)
    return Injected(detail=number.name)


def stop_a_rank_for_a_while(life: Life, random: Random) -> Injected:
    rank, process = _one_rank(life, random)
    seconds = random.uniform(0.5, 6.0)
    _send(process, signal.SIGSTOP)
    return Injected(
        detail=f"rank {rank} for {seconds:.1f} s",
        undo=lambda: _go_on(process),
        hold_seconds=seconds,
    )


def stop_a_rank_for_good(life: Life, random: Random) -> Injected:
    _require_steps(life)
    rank, process = _one_rank(life, random)
    _send(process, signal.SIGSTOP)
    return Injected(detail=f"rank {rank}", says=_named([rank]))


def freeze_ranks(life: Life, random: Random) -> Injected:
    """Stops some ranks with all that they have started: all ranks only where `evenpack train` watches them."""
    _require_steps(life)
    ranks = life.ranks()
    if len(ranks) < life.run.case.ranks:
        raise MissedError
    most = len(ranks) if life.run.case.stack == "evenpack train" else len(ranks) - 1
    chosen = sorted(random.sample(range(len(ranks)), random.randrange(most) + 1))
    frozen = 0
    for rank in chosen:
        for process in [ranks[rank], *_children(ranks[rank])]:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
                frozen += 1
    return Injected(detail=f"ranks {chosen}, {frozen} processes", says=_named(chosen))


def _children(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return list(process.children(recursive=True))
    return []


def _require_steps(life: Life) -> None:
    """Raises: MissedError in the start, which has a limit of its own."""
    if life.step() == 0:
        raise MissedError


def _named(ranks: Sequence[int]) -> str:
    return rf"rank ({'|'.join(map(str, ranks))}) on \S+ failed: no progress for "


def slow_a_rank(life: Life, random: Random) -> Injected:
    rank, process = _one_rank(life, random)
    seconds = random.uniform(1.0, 4.0)
    deadline = time.monotonic() + seconds
    with suppress(psutil.NoSuchProcess):
        while time.monotonic() < deadline:
            process.send_signal(signal.SIGSTOP)
            time.sleep(0.08)
            process.send_signal(signal.SIGCONT)
            time.sleep(0.02)
    return Injected(detail=f"rank {rank} at a fifth of its speed for {seconds:.1f} s")


def fill_the_disk(life: Life, random: Random) -> Injected:
    ballast = life.run.folder.parent / "ballast"
    left = random.choice((0, 4_096, random.randrange(600_000)))
    fill(ballast, left_bytes=left)
    return Injected(detail=f"{left} bytes left", undo=lambda: ballast.unlink(missing_ok=True), hold_seconds=4.0)


def remove_the_directory(life: Life, _random: Random) -> Injected:
    if not life.ranks():
        raise MissedError
    while life.run.output_dir.exists():  # what is written meanwhile is left, and would be half a checkpoint
        shutil.rmtree(life.run.output_dir, ignore_errors=True)
    return Injected(detail="run.output_dir")


def start_a_second_run(life: Life, random: Random) -> Injected:
    if not life.ranks():
        raise MissedError
    log = life.run.folder / f"second_{random.randrange(10**9)}.log"
    second = Life(life.run, life.run.command(), log)
    deadline = time.monotonic() + 60.0
    while second.is_on() and time.monotonic() < deadline:
        if not life.is_on():  # done, so that the second one may go on
            second.kill()
            raise MissedError
        time.sleep(0.1)
    if second.is_on():
        second.process.kill()
        raise BrokenError("the second run did not end within 60 s")
    if not life.is_on():
        raise MissedError
    if second.process.returncode == 0:
        raise BrokenError("the second run ended with 0")
    if "another run" not in second.said() and "in use" not in second.said():
        raise BrokenError(f"the second run did not say why it ended: {second.said()[-400:]}")
    return Injected(detail=f"ended with {second.process.returncode}")


def delete_a_file(life: Life, random: Random) -> Injected:
    """Deletes any file that the run has written, or a checkpoint that is being written."""
    found = paths_below(life.run.output_dir)
    files = [path for path in found if path.is_file() or path.name.endswith(".partial")]
    if not files:
        raise MissedError
    path = random.choice(files)
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
    return Injected(detail=str(path.relative_to(life.run.output_dir)))


RUNNING_FAULTS = (
    RunningFault(name="SIGKILL to a rank", ends="must", costs_start=True, inject=kill_a_rank, fits=_together),
    RunningFault(name="SIGKILL to all ranks", ends="must", costs_start=True, inject=kill_all_ranks, fits=_together),
    RunningFault(
        name="SIGKILL to the only process",
        ends="must",
        costs_start=True,
        inject=kill_all_ranks,
        fits=_alone,
        silent=True,
    ),
    RunningFault(
        name="SIGKILL to a launcher", ends="must", costs_start=True, inject=kill_a_launcher, fits=_together, silent=True
    ),
    RunningFault(name="SIGKILL to a loader's worker", ends="may", costs_start=True, inject=kill_a_loader),
    RunningFault(name="SIGKILL to the resource tracker", ends="never", inject=kill_a_resource_tracker),
    RunningFault(
        name="SIGTERM, SIGINT or SIGHUP",
        ends="must",
        costs_start=True,
        inject=ask_to_stop,
        asks_to_save=True,
        silent=True,
    ),
    RunningFault(name="SIGSTOP to a rank, for a while", ends="never", inject=stop_a_rank_for_a_while),
    RunningFault(
        name="SIGSTOP to a rank, for good", ends="must", costs_start=True, inject=stop_a_rank_for_good, fits=_together
    ),
    RunningFault(
        name="SIGSTOP to all processes of ranks", ends="must", costs_start=True, inject=freeze_ranks, fits=_together
    ),
    RunningFault(name="a slow rank", ends="never", inject=slow_a_rank),
    RunningFault(name="the disk is full", ends="may", inject=fill_the_disk, fits=_on_small_disk),
    RunningFault(name="the directory is removed", ends="must", costs_start=True, inject=remove_the_directory),
    RunningFault(name="a second run on the directory", ends="never", costs_start=True, inject=start_a_second_run),
    RunningFault(name=A_FILE_DELETED, ends="may", inject=delete_a_file),
)


def wait_for_moment(life: Life, random: Random, *, start_seconds: float) -> str:
    """Waits for a random moment of the start, of the training, or of a save; returns its name.

    Args:
        start_seconds: what a start takes about.

    Raises: MissedError if the run ends before.
    """
    moment = random.choice(("starting", "training", "training", "saving"))
    if moment == "starting" and life.step() == 0:
        life.wait_for(lambda: life.step() > 0, seconds=random.uniform(0.0, start_seconds))
        if not life.is_on():
            raise MissedError
        return moment
    target = life.step() + random.randrange(1, 20)
    if not life.wait_for(lambda: life.step() >= target, seconds=300.0):
        raise MissedError
    if moment == "saving":
        if not life.wait_for(lambda: bool(listed(life.run.checkpoints, ".step_*.partial")), seconds=300.0):
            raise MissedError
        time.sleep(random.uniform(0.0, 0.02))
    else:
        time.sleep(random.uniform(0.0, 0.1))
    return f"{moment}, step {life.step()}"


@dataclass(frozen=True, kw_only=True)
class Spoil:
    """A fault that a run has from its start on: `spoiled_worker` reads it from a file and makes it."""

    name: str
    detail: str
    says: str | None
    """A part of the message with which the run ends; None: it goes on."""


NAN, OTHER_FILE, SLOW_DISK = "a loss is NaN", "a rank reads another run file", "a slow disk"
LONG_COMPILATION = "a compilation longer than the time-out"
SPOILS = (NAN, OTHER_FILE, SLOW_DISK, LONG_COMPILATION)


def spoils_of(run: SubjectRun) -> list[str]:
    """Returns the names of those that a run can have."""
    return [name for name in SPOILS if name != OTHER_FILE or _together(run)]


def write_spoil(run: SubjectRun, random: Random, *, after: int, name: str) -> Spoil:
    """Writes this fault for a run of which so many steps are saved."""
    rank = random.randrange(run.case.ranks)
    wanted: dict[str, object] = {"name": name, "rank": rank}
    says: str | None = None
    if name == NAN:
        wanted["step"] = after + random.randrange(1, 25)
        detail, says = f"step {wanted['step']} on rank {rank}", "bad_steps"
    elif name == OTHER_FILE:
        key, says = random.choice([("output_dir", "run.output_dir"), ("seed", "run.seed"), (None, "does not exist")])
        other = run.folder / "other.yaml"
        other.unlink(missing_ok=True)
        if key is not None:
            values = yaml.safe_load(run.run_file.read_text())
            values["run"][key] = 12 if key == "seed" else str(run.folder / "elsewhere")
            other.write_text(yaml.safe_dump(values, sort_keys=False))
        wanted["run_file"], detail = str(other), f"rank {rank}, {says}"
    elif name == LONG_COMPILATION:
        wanted["step"] = after + random.randrange(2, 4)  # the first step of a start has its limit in any case
        wanted["seconds"] = subject.HANG_TIMEOUT_SECONDS * random.uniform(1.3, 1.6)
        detail = f"{wanted['seconds']:.0f} s in step {wanted['step']} on rank {rank}"
    else:
        wanted["seconds"] = random.uniform(0.02, 0.2)
        detail = f"{wanted['seconds']:.2f} s at each flush and each new name"
    (run.folder / "spoil.json").write_text(json.dumps(wanted))
    return Spoil(name=name, detail=detail, says=says)
