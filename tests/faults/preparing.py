"""Faults of `evenpack prepare`: killed, damaged, or without space; then the same command again."""

import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

import psutil
from prepared_files import command_with_parts

from evenpack.files import file_checksum
from faults.at_rest import ACTIONS, kind_of, random_file
from faults.disks import fill
from faults.life import END_SECONDS, living_in
from faults.subject import environment_of, paths_below, run_to_end, temporary_dir, write_run, write_source
from faults.traces import Traces, left_behind, mapped_names
from faults.tried import BrokenError, Tried, has_traceback

_NOT_COMPARED = ("tokens.journal.json", "shuffled.journal.json", "tokenizer.trained_on.json")
"""Records by which an interrupted call resumes: nothing reads those of a finished set, and its manifest omits them."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A way to prepare."""

    grid: bool
    workers: int

    def __str__(self) -> str:
        return f"{'grid shuffle' if self.grid else 'permutation'}, {self.workers} workers"


SHAPES = (Shape(grid=False, workers=1), Shape(grid=False, workers=2), Shape(grid=True, workers=1))


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """One call of the command."""

    exit_code: int
    said: str
    seconds: float
    """From the fault, or else the start, to the end of the last process."""
    left: tuple[str, ...]
    """Processes that had to be killed."""
    was_hit: bool
    """Whether the fault came before its end."""


class Preparing:
    """Prepares the same data again and again, in a folder of its own."""

    def __init__(self, folder: Path, source: Path) -> None:
        self.folder = folder
        self._source = source
        self.reference = cache(self._reference)

    @property
    def data_dir(self) -> Path:
        return self.folder / "run" / "data"

    def begin(self, shape: Shape) -> list[str]:
        """Empties the folder; returns the command."""
        run = self.folder / "run"
        shutil.rmtree(run, ignore_errors=True)
        run.mkdir(parents=True)
        file = write_run(run, self._source, grid=shape.grid)
        return [*command_with_parts(40_000), "prepare", str(file), "--workers", str(shape.workers)]

    def files(self) -> dict[str, str]:
        """Returns the checksum of every prepared file."""
        return {
            str(path.relative_to(self.data_dir)): file_checksum(path)
            for path in paths_below(self.data_dir)
            if path.is_file() and path.name not in _NOT_COMPARED and not path.name.startswith(".")
        }

    def call(
        self, command: list[str], *, hit: Callable[[list[psutil.Process]], None] | None = None, after: float = 0.0
    ) -> Prepared:
        """Runs the command, and hits its processes after so many seconds."""
        names: set[str] = set()
        before = self._traces(names)
        log = self.folder / "prepare.log"
        started = time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                env=environment_of(self.folder),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        was_hit = False
        if hit is not None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=after)
            if process.poll() is None:
                was_hit, started, names = True, time.monotonic(), mapped_names(living_in(self.folder))
                hit(living_in(self.folder))
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=END_SECONDS if was_hit else 600.0)
        while living_in(self.folder) and time.monotonic() - started < END_SECONDS:
            time.sleep(0.05)
        left = living_in(self.folder)
        for one in left:
            with suppress(psutil.Error):
                one.kill()
        process.wait()
        but = "pymp-" if was_hit else None  # a folder of sockets stays if the process dies before it has workers
        stays = left_behind(before, lambda: self._traces(names), but=but)
        if stays:
            raise BrokenError(f"left behind: {', '.join(stays)}")
        return Prepared(
            exit_code=process.wait(),
            said=log.read_text(errors="replace"),
            seconds=time.monotonic() - started,
            left=tuple(str(one.pid) for one in left),
            was_hit=was_hit,
        )

    def _traces(self, names: set[str]) -> Traces:
        return Traces.now(temporary_dir(self.folder), living_in(self.folder), names)

    def _reference(self, shape: Shape) -> tuple[dict[str, str], float]:
        """Returns the files of an undisturbed call, and its seconds."""
        command = self.begin(shape)
        started = time.monotonic()
        run_to_end(command, environment_of(self.folder))
        return self.files(), time.monotonic() - started


class PreparingFaults:
    """Faults of the command, one after the other."""

    def __init__(self, folder: Path, *, disk: Path | None, random: Random) -> None:
        """`disk`: a small one that can be filled."""
        source = write_source(folder)
        self._preparing = Preparing(folder, source)
        self._on_disk = None if disk is None else Preparing(disk / "preparing", source)
        self._disk = disk
        self._random = random

    def one(self) -> Tried | None:
        """Tries one fault; None if the command was done before it."""
        shape = self._random.choice(SHAPES)
        files, seconds = self._preparing.reference(shape)
        faults = [self._kill, self._damage, self._damage_unfinished, *([self._fill] if self._disk else [])]
        fault = self._random.choice(faults)
        tried = Tried(name="", where=f"prepare; {shape}", detail="")
        preparing = self._on_disk if fault == self._fill and self._on_disk is not None else self._preparing
        command = preparing.begin(shape)
        try:
            called = fault(preparing, command, tried, seconds)
            if called is None:
                return None
            self._judge(preparing, command, called, tried, files)
        except BrokenError as problem:
            tried.problem = str(problem)
        finally:
            shutil.rmtree(preparing.folder / "run", ignore_errors=True)
        return tried

    def _kill(self, preparing: Preparing, command: list[str], tried: Tried, seconds: float) -> Prepared | None:
        after = self._random.uniform(0.5, seconds)
        called = preparing.call(command, hit=self._kill_one, after=after)
        tried.name, tried.detail, tried.seconds = "SIGKILL to prepare", f"after {after:.2f} s", called.seconds
        return called if called.was_hit else None

    def _kill_one(self, processes: list[psutil.Process]) -> None:
        with suppress(psutil.Error, IndexError):
            self._random.choice(processes).send_signal(signal.SIGKILL)

    def _fill(self, preparing: Preparing, command: list[str], tried: Tried, _seconds: float) -> Prepared:
        assert self._disk is not None, "filled only where there is one"
        ballast = self._disk / "ballast"
        left = self._random.randrange(20_000, 4_000_000)
        fill(ballast, left_bytes=left)
        called = preparing.call(command)
        ballast.unlink()
        tried.name, tried.detail = "the disk is full in prepare", f"{left} bytes left"
        return called

    def _damage(self, preparing: Preparing, command: list[str], tried: Tried, _seconds: float) -> Prepared:
        preparing.call(command)
        path = random_file([preparing.data_dir], self._random)
        assert path is not None, "the data is prepared"
        return self._call_with_damage(preparing, command, tried, path, state="prepared")

    def _damage_unfinished(
        self, preparing: Preparing, command: list[str], tried: Tried, seconds: float
    ) -> Prepared | None:
        """As a loss of power does, after which the last written files may be short or wrong."""
        killed = preparing.call(command, hit=self._kill_one, after=self._random.uniform(0.5, seconds))
        path = random_file([preparing.data_dir], self._random) if preparing.data_dir.is_dir() else None
        if path is None:
            return None
        state = "interrupted" if killed.was_hit else "prepared"
        return self._call_with_damage(preparing, command, tried, path, state=state)

    def _call_with_damage(
        self, preparing: Preparing, command: list[str], tried: Tried, path: Path, *, state: str
    ) -> Prepared:
        action = self._random.choice(sorted(ACTIONS))
        tried.name = f"{state}, {action}: {kind_of(path)}"
        tried.detail = f"{path.relative_to(preparing.data_dir)}: {ACTIONS[action](path, self._random)}"
        return preparing.call(command)

    def _judge(
        self, preparing: Preparing, command: list[str], called: Prepared, tried: Tried, files: dict[str, str]
    ) -> None:
        """Raises: BrokenError unless the files are whole, or the command refused them and makes them again."""
        tried.said = called.said[-800:]
        if called.left:
            raise BrokenError(f"processes lived on: {', '.join(called.left)}")
        if has_traceback(called.said) and not called.was_hit:
            raise BrokenError(f"a traceback instead of a message: {called.said[-1500:]}")
        if called.exit_code == 0 and preparing.files() == files:
            tried.outcome = "went on"
            return
        if called.exit_code == 0:
            raise BrokenError(f"the command ended with 0 and other files: {called.said[-300:]}")
        if tried.name.startswith(("prepared", "interrupted")):
            shutil.rmtree(preparing.data_dir, ignore_errors=True)  # as its message says; without sources it is gone
        again = preparing.call(command)
        if again.exit_code != 0:
            raise BrokenError(f"the same command ended with {again.exit_code}: {again.said[-600:]}")
        if preparing.files() != files:
            raise BrokenError("the same command left other files than an undisturbed one")
        tried.outcome = "ended clearly"
