"""Processes that tokenise parts, each into a token file of its own: on this machine, or MPI ranks on many."""

import os
import socket
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol, cast, runtime_checkable

from evenpack.data.prepare.tokenising import TokenisingState, append_parts, columns, encoder
from evenpack.data.sources.corpus import CorpusPart
from evenpack.data.tokenizers.tokenizer import Tokenizer
from evenpack.data.tokens.array_file import open_array
from evenpack.data.tokens.file import TokenFile, bin_path, index_path
from evenpack.data.tokens.writer import Journal, TokenFileWriter, column_path
from evenpack.errors import ConfigError, DataError, RunError
from evenpack.files import file_checksum
from evenpack.launch_environment import MPI_LOCAL_SIZE, MPI_WORLD_SIZE
from evenpack.worker_pool import worker_pool


@dataclass(frozen=True, kw_only=True)
class PartTask:
    """The task of a worker, which can be pickled."""

    number: int
    """Number of the part, from 0."""
    part: CorpusPart
    source: str
    prefix: Path
    """Prefix of the part's token file."""
    tokenizer_folder: Path
    tokenizer_checksum: str
    language: str | None
    """Language whose rules split documents into sentences; None if they are not split."""


@dataclass(frozen=True, kw_only=True)
class PartFile:
    """A tokenised part."""

    prefix: Path
    journal: Journal
    worker: str
    """Host and process."""

    @property
    def state(self) -> TokenisingState:
        return TokenisingState.of_json(self.journal.state)

    def append_to(self, writer: TokenFileWriter) -> None:
        """Copies tokens and columns. Raises: RunError for a file that is not as the worker wrote it."""
        for path in (bin_path(self.prefix), index_path(self.prefix), *map(self._column, self.journal.column_values)):
            found, expected = file_checksum(path), self.journal.checksums[path.name].whole
            if found != expected:
                raise RunError(
                    f"{path} is not as {self.worker} wrote it (its checksum is {found}, expected {expected}): check "
                    "the disk, and run the same command again; it tokenises this part again"
                )
        token_file = TokenFile(self.prefix, verify=False)
        names = self.journal.column_values
        writer.append(
            token_file.read(0, token_file.tokens),
            token_file.document_lengths(),
            {name: open_array(self._column(name)) for name in names},
        )

    def _column(self, name: str) -> Path:
        return column_path(self.prefix, name)


def write_part(task: PartTask) -> PartFile:
    """Tokenises a part.

    Raises: DataError for what is wrong in the source; RunError for what is wrong with this host: a file or the
    tokenizer cannot be read here, or the part cannot be written.
    """
    tokenizer = _tokenizer_of(task.tokenizer_folder, task.tokenizer_checksum)
    size, kept = tokenizer.vocabulary_size, columns(task.language)
    try:
        with TokenFileWriter(task.prefix, vocabulary_size=size, columns=kept) as writer:
            state = append_parts(
                (task.part,),
                encoder(tokenizer, task.language),
                writer,
                TokenisingState(origin={}),
                report=lambda _: _exit_if_requested(task),
            )
            journal = writer.finish(state.to_json())
    except DataError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        raise RunError(
            f"part {task.number} of source '{task.source}' could not be read on host {socket.gethostname()}: {error}. "
            "What is tokenised is kept: the same command resumes once every host can read the source"
        ) from error
    worker = f"{socket.gethostname()}, process {os.getpid()}"
    return PartFile(prefix=task.prefix, journal=journal, worker=worker)


def stop_file(parts_folder: Path) -> Path:
    """The file that asks those who tokenise parts in this folder to stop."""
    return parts_folder / "stop"


def _exit_if_requested(task: PartTask) -> None:
    if stop_file(task.prefix.parents[1]).exists():
        raise RunError(f"part {task.number} of source '{task.source}' was given up")


@lru_cache(maxsize=1)
def _tokenizer_of(folder: Path, checksum: str) -> Tokenizer:
    """Raises: RunError if this machine does not see the prepared directory, or sees another one."""
    host = socket.gethostname()
    if not folder.is_dir():
        raise RunError(
            f"{folder} is not there on host {host}: workers on several hosts need a data.prepared_dir on a file "
            "system that all of them share. What is tokenised is kept: the same command resumes then"
        )
    tokenizer = Tokenizer.load(folder)
    if tokenizer.checksum != checksum:
        raise RunError(
            f"{folder} on host {host} holds another tokenizer than the one of this run (checksum {tokenizer.checksum}, "
            f"expected {checksum}): all hosts must see the same data.prepared_dir"
        )
    return tokenizer


_Pending = deque[tuple[PartTask, Future[PartFile]]]
"""Tasks in order, and what will come of them."""


@runtime_checkable
class Workers(Protocol):
    """Processes that tokenise parts."""

    def files(self, tasks: Sequence[PartTask]) -> Generator[PartFile, None, None]:
        """The parts' token files in the order of the tasks, each as soon as those before it are there.

        Tasks are taken a bounded number ahead. When it is closed early, it returns once no worker writes any more.

        Raises: the error of a task, in the order of tasks; RunError if a worker dies.
        """


class LocalWorkers:
    """Processes of this machine.

    They import the main script again, so a script that uses them must begin its work below
    `if __name__ == "__main__":`.
    """

    def __init__(self, count: int) -> None:
        """Takes the number of workers; starts none yet."""
        if count < 1:
            raise ValueError(f"expected at least 1 worker, got {count}")
        self._count = count

    def files(self, tasks: Sequence[PartTask]) -> Generator[PartFile, None, None]:
        cores = max(1, len(os.sched_getaffinity(0)) // self._count)
        try:
            with worker_pool(self._count, preloaded=[__name__], environment={"RAYON_NUM_THREADS": str(cores)}) as pool:
                yield from _in_order(pool, tasks, _ahead(self._count))
        except BrokenExecutor as error:
            raise RunError(
                f"a worker that tokenised source '{tasks[0].source}' died: where memory is short, use fewer --workers; "
                'a script must call prepare below `if __name__ == "__main__":`. The same command resumes after the '
                "last part that is joined"
            ) from error


class MpiWorkers:
    """MPI ranks, on any number of machines, as an executor of `mpi4py.futures`.

    A rank that dies ends the whole job, as MPI does; the same command resumes after the last part that is joined.
    """

    def __init__(self, executor: Executor, count: int) -> None:
        """Takes the `executor` of `MPICommExecutor`, in its root."""
        self._executor = executor
        self._count = count

    def files(self, tasks: Sequence[PartTask]) -> Generator[PartFile, None, None]:
        yield from _in_order(self._executor, tasks, _ahead(self._count), end=_request_exit)


def local_workers(count: int | None) -> LocalWorkers | None:
    """Returns workers of this machine; None for 1, which is this process itself.

    The default is one for each two cores.
    """
    count = count or max(1, len(os.sched_getaffinity(0)) // 2)
    return None if count == 1 else LocalWorkers(count)


def _ahead(workers: int) -> int:
    """Returns how many parts may be in work or finished before the first of them is: one large part delays no other."""
    return 4 * workers


def _in_order(
    executor: Executor,
    tasks: Sequence[PartTask],
    ahead: int,
    *,
    end: Callable[[_Pending], None] = lambda _: None,
) -> Iterator[PartFile]:
    """`end` is given what is at work when the iteration ends early."""
    pending: _Pending = deque()
    try:
        for task in tasks:
            pending.append((task, executor.submit(write_part, task)))
            if len(pending) == ahead:
                yield _first(pending)
        while pending:
            yield _first(pending)
    finally:
        if at_work := deque(entry for entry in pending if not entry[1].cancel()):
            end(at_work)


def _request_exit(pending: _Pending) -> None:
    """Returns when none of these writes any more: what is at work on another host cannot be cancelled."""
    for folder in {task.prefix.parents[1] for task, _ in pending}:
        folder.mkdir(parents=True, exist_ok=True)
        stop_file(folder).touch()
    wait([future for _, future in pending])


def _first(pending: _Pending) -> PartFile:
    _, future = pending[0]
    wait([future])  # an interrupt leaves it among those at work
    pending.popleft()
    return future.result()


def started_ranks() -> int:
    """Returns the number of MPI ranks of which this process is one; 1 without MPI. Raises: ConfigError."""
    return MPI_WORLD_SIZE.read(os.environ) or 1


@contextmanager
def mpi_workers() -> Iterator[MpiWorkers | None]:
    """Yields all other ranks as workers in rank 0; the others work until it leaves its block, and then get None.

    Raises: ConfigError if mpi4py, or the MPI library that it needs, is missing.
    """
    try:
        from mpi4py import MPI
        from mpi4py.futures import MPICommExecutor
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"started as one of {started_ranks()} MPI ranks, but mpi4py cannot be imported ({error}): install "
            "evenpack[mpi], or mpi4py for the MPI of this cluster, on every host; or start without mpirun and use "
            "--workers"
        ) from error
    os.environ.setdefault("RAYON_NUM_THREADS", str(_cores_of_a_rank()))
    ranks = MPI.COMM_WORLD.Get_size()
    if ranks != started_ranks():
        raise ConfigError(
            f"{MPI_WORLD_SIZE.found_in(os.environ)}={started_ranks()} says that mpirun has started so many ranks, but "
            f"mpi4py sees {ranks}. Without mpirun unset the variable. With it, mpi4py was built for another MPI: "
            "install mpi4py for this mpirun, or use the mpirun of evenpack[mpi]"
        )
    with MPICommExecutor(MPI.COMM_WORLD, root=0) as entered:
        executor = cast("Executor | None", entered)  # its stub names another class
        yield None if executor is None else MpiWorkers(executor, ranks - 1)


def _cores_of_a_rank() -> int:
    """Returns the cores to which it is bound, or its part of the machine's."""
    allowed = len(os.sched_getaffinity(0))
    return allowed if allowed < (os.cpu_count() or 1) else max(1, allowed // (MPI_LOCAL_SIZE.read(os.environ) or 1))
