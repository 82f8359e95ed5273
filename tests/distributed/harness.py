"""Runs a module-level function on several gloo ranks on this machine's CPU."""

import importlib
import multiprocessing
import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

_GRACE_SECONDS = 3.0
"""How long the others may take to report as well once one rank has failed."""


class RanksFailed(AssertionError):  # noqa: N818 - reads as what happened
    """A rank raised, died or did not answer in time; the message holds what each rank has to say."""


def run_ranks(
    function: Callable[..., Any], ranks: int, *arguments: Any, timeout_seconds: float = 150.0, threads: int = 1
) -> list[Any]:
    """Calls `function(world, *arguments)` on each rank and returns what each returned, in the order of ranks.

    `function` must be found by its module and name; arguments and results are pickled by value. However it ends,
    no process is left.
    """
    context = multiprocessing.get_context("spawn")
    name = (function.__module__, function.__qualname__)
    port = _free_port()
    processes, answers = [], []
    for rank in range(ranks):
        here, there = context.Pipe(duplex=False)
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": str(threads),
        }
        process = context.Process(target=_rank_main, args=(there, environment, name, arguments))
        process.start()
        there.close()
        processes.append(process)
        answers.append(here)
    try:
        reports = _collect(answers, time.monotonic() + timeout_seconds)
    finally:
        for process in processes:
            process.kill()
            process.join()
    failures = [f"--- rank {rank}: {text}" for rank, (ok, text) in enumerate(reports) if not ok]
    if failures:
        raise RanksFailed("\n".join(failures))
    return [result for _, result in reports]


def _collect(answers: list[Connection], deadline: float) -> list[tuple[bool, Any]]:
    """One (succeeded, result or text) for each rank."""
    reports: list[tuple[bool, Any]] = [(False, "no answer within the time limit; killed")] * len(answers)
    waiting = dict(zip(answers, range(len(answers)), strict=True))
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            rank = waiting.pop(connection)
            try:
                reports[rank] = pickle.loads(connection.recv_bytes())
            except EOFError:
                reports[rank] = (False, "exited without an error message")
            if not reports[rank][0]:
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
    return reports


def _rank_main(
    answer: Connection, environment: dict[str, str], name: tuple[str, str], arguments: tuple[Any, ...]
) -> None:
    os.environ.update(environment)  # before torch is imported, which reads OMP_NUM_THREADS then
    try:
        import conftest  # noqa: F401 - checks shapes and types in this process too

        from evenpack.engine.distributed import joined_world

        function = getattr(importlib.import_module(name[0]), name[1])
        with joined_world() as world:
            result = function(world, *arguments)
            world.barrier()
        report = (True, result)
    except BaseException:
        report = (False, traceback.format_exc())
    answer.send_bytes(pickle.dumps(report))
    answer.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a failed rank must not wait at exit for the others


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
