"""Runs work ahead in threads, and takes its results in order."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def mapped(function: Callable[[T], R], items: Iterator[T], executor: Executor, *, threads: int) -> Iterator[R]:
    """Calls `map` in order, in the executor's threads, at most one call ahead of each."""
    pending: deque[Future[R]] = deque()
    for item in items:
        pending.append(executor.submit(function, item))
        if len(pending) > threads:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()
