"""Runs a function on several gloo ranks on this machine's CPU, each a process of its own.

Importing torch and DeepSpeed takes each rank seconds, so one process of this machine imports them once and every rank
is forked from it: new processes with a state of their own, without those seconds. A script that calls `run_ranks` needs
`if __name__ == "__main__":`, as `multiprocessing` does.
"""

import gc
import importlib
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.reduction import DupFd
from typing import Any, TypeVar

from evenpack.errors import EvenpackError
from evenpack.launch_environment import free_port, without_launcher
from evenpack.worker_pool import make_sockets_of_short_names

ResultT = TypeVar("ResultT")

_HEAVY = (
    "run_files",
    "evenpack.engine.train",
    "deepspeed",
    "torch._dynamo",  # every optimizer of torch imports it when it is built
    "deepspeed.runtime.zero.muon.muon_optimizer",  # ZeRO imports it, and with it torch's compiler
    "deepspeed.module_inject.auto_ep_layer",  # the engine imports it
)
"""Modules that ranks import in any case: seconds of CPU time."""

_ADDRESS = "EVENPACK_TESTS_FORK_SERVER"
"""The variable with the process that shares its fork server with its children, and the server's socket."""

_GRACE_SECONDS = 5.0
"""Seconds for the others to report as well once one rank has failed."""

_preloaded: list[str] = []
_context: list[ForkServerContext] = []
"""The only context, once it has been started."""


class RanksFailed(AssertionError):  # noqa: N818 - reads as what happened
    """A rank raised, died or did not answer in time; the message holds the report of each rank."""


def preload(*modules: str) -> None:
    """Imports these modules before any other one in every rank; to be called before the first run.

    Raises: EvenpackError if ranks have been started already.
    """
    missing = [module for module in modules if module not in _preloaded]
    if missing and _context:
        raise EvenpackError(f"preload({', '.join(map(repr, missing))}) must come before the first start of ranks")
    _preloaded.extend(missing)


def run_ranks(
    function: Callable[..., ResultT], ranks: int, *arguments: Any, timeout_seconds: float = 900.0
) -> list[ResultT]:
    """Calls `function(world, *arguments)` on each rank and returns what each returned, in the order of ranks.

    `function` must be found by its module and name; arguments and results are pickled. Each call has new processes,
    with the environment of the caller and one thread each; none of them outlives the call. The first call ends the fork
    server of multiprocessing, so no pool that it serves may be open in the caller.

    Args:
        ranks: number of ranks; they join one gloo process group as ranks of a training run do.
        timeout_seconds: limit for ranks that hang; so long that a busy machine never reaches it.

    Raises: RanksFailed.
    """
    context = fork_context()
    port = free_port()
    call = (function.__module__, function.__qualname__, arguments)
    processes, answers = [], []
    try:
        for rank in range(ranks):
            here, there = context.Pipe(duplex=False)
            environment = _rank_environment(rank, ranks, port)
            process = context.Process(target=_rank_main, args=(there, environment, tuple(_preloaded), call))
            process.start()
            there.close()
            processes.append(process)
            answers.append(here)
        reports = _collect(answers, time.monotonic() + timeout_seconds)
    finally:
        for process in processes:
            process.kill()
            process.join()
    failures = [f"--- rank {rank}: {text}" for rank, (ok, text) in enumerate(reports) if not ok]
    if failures:
        raise RanksFailed("\n".join(failures))
    return [result for _, result in reports]


class _Output:
    """Standard output and error of the process that starts another one, which takes them as it reads this."""

    def __reduce__(self) -> tuple[Callable[..., "_Output"], tuple[Any, Any]]:
        return _take_output, (DupFd(1), DupFd(2))


def _take_output(*descriptors: Any) -> _Output:
    for number, descriptor in enumerate(descriptors, start=1):
        own = descriptor.detach()
        os.dup2(own, number)
        os.close(own)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background job ignores, and its server
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    return _Output()


class _Process(ForkServerProcess):
    """A process that has the output of the one that starts it, although another one, the fork server, is its parent."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._output = _Output()


class _Context(ForkServerContext):
    Process = _Process  # type: ignore[assignment]


def fork_context() -> ForkServerContext:
    """Returns the context of `multiprocessing` whose processes begin with everything imported."""
    if not _context:
        end_fork_server()
        context = _Context()
        context.set_forkserver_preload([*_preloaded, *_HEAVY])
        make_sockets_of_short_names()
        server: Any = forkserver._forkserver
        owner, _, address = os.environ.get(_ADDRESS, "").partition(" ")
        if owner == str(os.getppid()):  # what a test starts may have another copy of the package
            server._forkserver_address = address
            server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)  # its end is not ours to decide
            server.ensure_running = resource_tracker.ensure_running
        else:
            settings = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
            with _environment(settings):
                server.ensure_running()
        _context.append(context)
    return _context[0]


def share_fork_server() -> None:
    """Starts the fork server for this process and its children: eight seconds of CPU time once, not in each."""
    fork_context()
    server: Any = forkserver._forkserver
    os.environ[_ADDRESS] = f"{os.getpid()} {server._forkserver_address}"


def end_fork_server() -> None:
    """Ends the process that multiprocessing forks from, if it runs.

    A process has one, with the modules of whoever started it first: that of a pool of workers has not imported what
    ranks need before anything else, such as checks of signatures.
    """
    server: Any = forkserver._forkserver
    vars(server).pop("ensure_running", None)  # that of another process is not this one's to end
    if server._forkserver_pid is not None:
        # It would end by itself once its pipe is closed, which processes that were forked from this one hold open.
        os.kill(server._forkserver_pid, signal.SIGKILL)
    server._stop()


@contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(settings)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    place = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {**without_launcher(os.environ), **place, **master, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}


def _collect(answers: list[Connection], deadline: float) -> list[tuple[bool, Any]]:
    """Returns one (succeeded, result or text) for each rank."""
    reports: list[tuple[bool, Any]] = [(False, "no answer within the time limit; killed")] * len(answers)
    waiting = dict(zip(answers, range(len(answers)), strict=True))
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = waiting.pop(connection)
            try:
                reports[rank] = pickle.loads(connection.recv_bytes())
            except EOFError:
                reports[rank] = (False, "exited without an error message")
            if not reports[rank][0]:
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
    return reports


def _rank_main(
    answer: Connection, environment: dict[str, str], preloaded: Sequence[str], call: tuple[str, str, tuple[Any, ...]]
) -> None:
    gc.freeze()  # otherwise each collection would scan all imported modules, half a second each, and copy them
    os.environ.clear()
    os.environ.update(environment)
    try:
        for module in preloaded:  # imported already; an import error is reported here
            importlib.import_module(module)
        from evenpack.engine.world.distributed import joined_world

        module_name, name, arguments = call
        function = getattr(importlib.import_module(module_name), name)
        with joined_world() as world:
            result = function(world, *arguments)
            world.barrier()
        report = pickle.dumps((True, result))
    except BaseException:
        report = pickle.dumps((False, traceback.format_exc()))
    answer.send_bytes(report)
    answer.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a failed rank must not wait at exit for the others
