"""Saves checkpoints in the background: training continues while every rank writes a copy of its part.

    main threads     begin: copy to host memory | training goes on             | finish, before the next save
    a thread each    write, flush and checksum own files; leave a report beside them
    rank 0's thread  wait for the reports of all ranks that write; manifest, rename, removal of obsolete checkpoints

Threads use no collectives, whose order would not be the same on all ranks, so they agree through files. A rank whose
disk does not even take its report gives it in `finish`, which is collective.
"""

import copy
import errno
import os
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from evenpack.engine.activity import doing, saving
from evenpack.engine.checkpoints.files import Checkpoint, FileRecord, TrainState, commit_files, list_files
from evenpack.engine.checkpoints.saving import CheckpointWriter, DeferredWrites, WritingEngine
from evenpack.errors import SaveError
from evenpack.files import read_json_object, write_json

_NICENESS = 10
"""Amount by which the thread's priority is lowered, so that training has the processor if no other is free."""

_POLL_SECONDS = 0.1
"""Seconds between two looks for the reports of other ranks."""


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """The files of a save that one rank has written."""

    files: tuple[FileRecord, ...]
    problem: str | None
    """Why it could not write them all; None if it could."""

    def write(self, path: Path) -> None:
        """Writes the report for rank 0. Raises: OSError."""
        write_json(path, asdict(self))

    @classmethod
    def read(cls, path: Path) -> "RankReport | None":
        """Returns the report; None if it is not there yet."""
        values = read_json_object(path)
        if values is None:
            return None
        return cls(files=tuple(FileRecord(**record) for record in values["files"]), problem=values["problem"])


@dataclass(frozen=True, kw_only=True)
class EndedSave:
    """A save in the background that is over."""

    result: Checkpoint | SaveError
    seconds: float
    """Since it began, until the checkpoint was complete and obsolete ones were removed."""


class BackgroundWriter:
    """Writes checkpoints in the background, one at a time; all ranks call its methods, unless they say otherwise."""

    def __init__(self, writer: CheckpointWriter) -> None:
        self._writer = writer
        self._world = writer.world
        self._copies = HostCopies()
        self._flight: _Flight | None = None
        self._is_over = True
        self._is_taken = True

    def begin(self, engine: WritingEngine, state: TrainState) -> None:
        """Copies the state and returns; it may change then. An earlier save is finished first.

        Raises: SaveError on every rank alike if it cannot be copied, or the directory cannot be made.
        """
        self.finish()
        started = time.perf_counter()
        with self._writer.partial_of(state) as partial:
            self._copies.begin()
            writes = self._writer.call_deepspeed(engine, partial, state, self._copies.copy)
            writing = self._world.all_gather(bool(writes))
        others = [rank for rank in range(1, self._world.size) if writing[rank]]
        self._flight = _Flight(
            writer=self._writer, state=state, partial=partial, writes=writes, others=others, started=started
        )
        self._is_over = self._is_taken = False
        self._flight.start()

    def finish(self) -> None:
        """Waits until no save is in progress. `ended` tells rank 0 whether the checkpoint is complete."""
        if self._flight is None or self._is_over:
            return
        own = self._flight.report.result()
        doing.enter("waiting for a save")
        reports = self._world.all_gather(own)
        if self._world.is_main:
            self._flight.tell(reports)
            self._flight.join()
        self._world.barrier()
        self._is_over = True

    def wait_alone(self, *, seconds: float) -> None:
        """Waits, without the other ranks, for the save in flight; for a run that ends with an error."""
        if self._flight is not None:
            self._flight.join(seconds=seconds)

    @property
    def is_writing(self) -> bool:
        """Whether a save is in flight; for rank 0 alone."""
        return self._flight is not None and not self._flight.published.done()

    def ended(self) -> EndedSave | None:
        """Returns how the last save ended, once, and None while it is in flight; for rank 0 alone."""
        if self._flight is None or self._is_taken or not self._flight.published.done():
            return None
        self._is_taken = True
        return self._flight.published.result()


class HostCopies:
    """Copies states, each save into the memory of the one before, which must be on disk.

    That memory is as large as the files that this rank writes. For tensors of a GPU it is pinned, and torch rounds each
    part up to a power of two.
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self._used = 0

    def begin(self) -> None:
        """Begins a save: the memory of the previous one may be overwritten."""
        self._used = 0

    def copy(self, state: Any) -> Any:
        """Returns a copy of a state dict that shares nothing with it and makes the same file.

        Tensors that share memory (tied weights, views into a flat buffer) share it in the copy. The host waits for a
        device.

        Raises: OSError if there is not enough memory.
        """
        storages: dict[int, UntypedStorage] = {}
        devices = set()
        copies: dict[int, Any] = {}
        tensors = _tensors_in(state)
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in storages:
                storages[storage._cdata] = self._copied(storage)
                devices.add(storage.device)
            copies[id(tensor)] = _view_like(tensor, storages[storage._cdata])
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        for tensor in tensors:  # DeepSpeed marks tensors by attributes, which are saved as well
            vars(copies[id(tensor)]).update(copy.deepcopy(vars(tensor), copies))
        return copy.deepcopy(state, copies)  # of the tensors it takes these copies

    def _copied(self, storage: UntypedStorage) -> UntypedStorage:
        source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        buffer = self._next_buffer(storage.nbytes(), is_pinned=storage.device.type == "cuda")
        buffer.copy_(source, non_blocking=True)
        return buffer.untyped_storage()

    def _next_buffer(self, size: int, *, is_pinned: bool) -> Tensor:
        """Returns the buffer of the same place in the previous save; a new one if that had another size, in bytes."""
        index, self._used = self._used, self._used + 1
        if index == len(self._buffers) or self._buffers[index].numel() != size:
            del self._buffers[index:]  # before the next allocation
            try:
                self._buffers.append(torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned))
            except RuntimeError as error:
                raise OSError(
                    errno.ENOMEM,
                    f"no host memory for a copy of what this rank saves ({error}); "
                    "training.checkpoint_in_background=false saves without a copy",
                ) from error
        return self._buffers[index]


@dataclass(kw_only=True, eq=False, repr=False)
class _Flight:
    """The save in flight, as seen by one rank."""

    writer: CheckpointWriter
    state: TrainState
    partial: Path
    writes: DeferredWrites
    others: Sequence[int]
    """The ranks beside rank 0 that write."""
    started: float
    """When the save began, by `time.perf_counter`."""
    report: Future[RankReport] = field(default_factory=Future, init=False)
    """What this rank has written; its report file exists then, unless the disk is full."""
    published: Future[EndedSave] = field(default_factory=Future, init=False)
    """Set on rank 0 alone."""
    _reports: Sequence[RankReport] = field(default=(), init=False)
    _told: threading.Event = field(default_factory=threading.Event, init=False)

    def __post_init__(self) -> None:
        self._world = self.writer.world
        self._thread = threading.Thread(target=self._run, name="evenpack save", daemon=True)

    def start(self) -> None:
        """Begins to write."""
        self._thread.start()

    def join(self, *, seconds: float | None = None) -> None:
        """Waits for the end of this rank's part."""
        self._thread.join(seconds)

    def tell(self, reports: Sequence[RankReport]) -> None:
        """Gives rank 0 the reports of all ranks, for which it need not look any longer."""
        self._reports = reports
        self._told.set()

    def _run(self) -> None:
        """Writes, and on rank 0 publishes; an unexpected error is raised where the results are read."""
        try:
            _give_way()
            with saving():
                report = self._write()
            if not self._world.is_main and self.writes:
                with suppress(OSError):  # it is told in `finish`
                    report.write(self._report_path(self._world.rank))
            self.report.set_result(report)
            if self._world.is_main:
                result = self._publish(report)
                self.published.set_result(EndedSave(result=result, seconds=time.perf_counter() - self.started))
        except BaseException as error:
            if not self._world.is_main and self.writes and not self.report.done():  # rank 0 waits for a report
                problem = f"rank {self._world.rank} failed while saving a checkpoint: {type(error).__name__}: {error}"
                with suppress(Exception):
                    RankReport(files=(), problem=problem).write(self._report_path(self._world.rank))
            for future in (self.report, self.published):
                if not future.done():
                    future.set_exception(error)

    def _write(self) -> RankReport:
        files: list[FileRecord] = []
        try:
            with self.writer.explaining_failures():
                for path, write in self.writes.items():
                    write()
                    doing.tick()
                    files += commit_files(self.partial, [path.relative_to(self.partial).as_posix()])
        except SaveError as error:
            for path in self.writes:  # gives room to the report
                with suppress(OSError):
                    path.unlink(missing_ok=True)
            return RankReport(files=(), problem=str(error))
        return RankReport(files=tuple(files), problem=None)

    def _publish(self, own: RankReport) -> Checkpoint | SaveError:
        try:
            reports = [own, *self._wait_for_others()]
            for problem in (report.problem for report in reports if report.problem is not None):
                raise SaveError(problem)
            with saving():
                return self.writer.publish(self.partial, self.state, self._all_files(reports))
        except SaveError as error:
            shutil.rmtree(self.partial, ignore_errors=True)
            return error

    def _all_files(self, reports: Sequence[RankReport]) -> list[FileRecord]:
        """Returns the records of all files, also of those that DeepSpeed itself has written. Raises: SaveError."""
        files = [record for report in reports for record in report.files]
        with self.writer.explaining_failures():
            for rank in self.others:
                self._report_path(rank).unlink(missing_ok=True)
            known = {record.name for record in files}
            return files + commit_files(self.partial, [name for name in list_files(self.partial) if name not in known])

    def _wait_for_others(self) -> Sequence[RankReport]:
        found: list[RankReport] = []
        missing = list(self.others)
        while missing and not self._told.is_set():
            for rank in tuple(missing):
                report = RankReport.read(self._report_path(rank))
                if report is not None:
                    found.append(report)
                    missing.remove(rank)
            if missing:
                self._told.wait(_POLL_SECONDS)
        return self._reports[1:] if missing else found

    def _report_path(self, rank: int) -> Path:
        return self.partial / f"written_by_rank_{rank}.json"


def _give_way() -> None:
    """Lowers the priority of this thread, if it may; only Linux has priorities of threads."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with suppress(OSError):  # a sandbox may forbid it
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS)


def _tensors_in(value: Any) -> list[Tensor]:
    """Returns the plain tensors in nested containers and in attributes of tensors, each once.

    Those in other objects are left to `copy.deepcopy`.
    """
    found: dict[int, Tensor] = {}
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if type(one) is Tensor and id(one) not in found:
            found[id(one)] = one
            waiting += reversed(vars(one).values())
        elif isinstance(one, dict):
            waiting += reversed(one.values())
        elif isinstance(one, list | tuple):
            waiting += reversed(one)
    return list(found.values())


def _view_like(tensor: Tensor, storage: UntypedStorage) -> Tensor:
    """Returns a tensor that views `storage` as `tensor` does its own."""
    view = torch.empty(0, dtype=tensor.dtype)
    view.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
    return view.requires_grad_(tensor.requires_grad)
