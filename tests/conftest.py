"""Checks shapes and types in the package's signatures while the tests run."""

import gc
import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

# Small tensors gain nothing from threads, and several test processes share the cores. Before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import checked_types  # before anything of evenpack
from forked_ranks import end_fork_server, preload, share_fork_server

# Ranks that tests start check shapes and types, too; many import pytest.
preload("checked_types", "pytest", "checked_ranks")

_WAITING = ("test_worker.py", "test_hanging_runs.py")
"""Files whose tests mostly wait: they come first, so that others compute beside them."""


def pytest_configure(config: pytest.Config) -> None:
    """Hides a machine's GPUs from all tests but those of `-m gpu`, so that they compute the same on every machine."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if getattr(config.option, "numprocesses", None):  # the process that starts those of pytest-xdist
        share_fork_server()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Ends the fork server at once, also before it has imported everything."""
    if getattr(config.option, "numprocesses", None):
        end_fork_server()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Spares the garbage collector what test modules import and define: millions of objects that stay to the end.

    Without this each process spends a third of its collection on searching them, and seconds of its tests. What is
    left is so little that full collections would come in nearly every test, so they are made as rare as before.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(*gc.get_threshold()[:2], 1000)
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the files that wait before all others."""
    items.sort(key=lambda item: item.path.name not in _WAITING)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Has the first calls of each function checked in each test, whatever the tests before it have called."""
    checked_types.start_again()


@pytest.fixture(autouse=True, scope="session")
def _signals_that_count() -> None:
    """Restores signals that `nohup` or a shell's background job ignores, because child processes would inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(autouse=True, scope="module")
def _process_as_it_was() -> Iterator[None]:
    """Undoes what a module's runs changed in this process, which the next module may share."""
    environment = dict(os.environ)
    with _logger_as_it_was():
        yield
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture(autouse=True)
def _loggers_as_they_were() -> Iterator[None]:
    """Undoes what a run changed in the package's logger before the next test."""
    with _logger_as_it_was():
        yield


@contextmanager
def _logger_as_it_was() -> Iterator[None]:
    logger = logging.getLogger("evenpack")
    before = (list(logger.handlers), logger.level, logger.propagate)
    yield
    logger.handlers[:], logger.propagate = before[0], before[2]
    logger.setLevel(before[1])
