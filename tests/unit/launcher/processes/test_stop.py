"""A stop of a run is requested by a file, and a rank whose launcher has ended ends too."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from evenpack.launcher.processes.guard import Ancestors
from evenpack.launcher.processes.stop import (
    STOP_SIGNALS,
    StopFlag,
    StopRequest,
    on_stop_signals,
    read_stop_request,
    remove_stop_request,
    write_stop_request,
)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_sets_the_flag(number: signal.Signals) -> None:
    flag = StopFlag()
    flag.install()
    assert not flag.is_set()
    os.kill(os.getpid(), number)
    assert flag.is_set()


def test_only_a_second_interrupt_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    StopFlag().install()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTERM, signal.SIGHUP):
        os.kill(os.getpid(), number)
    assert codes == []
    os.kill(os.getpid(), signal.SIGINT)
    assert codes == [130]


def test_a_signal_that_nohup_has_set_to_be_ignored_stays_so() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    flag = StopFlag()
    flag.install()
    os.kill(os.getpid(), signal.SIGHUP)
    assert not flag.is_set()


def test_what_handled_the_signals_before_is_given_back() -> None:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    assert on_stop_signals(lambda number, frame: None) == before


def test_a_request_reaches_the_run_that_it_names_and_no_other(tmp_path: Path) -> None:
    request = StopRequest(run_id="this", at_once=False)
    write_stop_request(tmp_path, request)
    assert read_stop_request(tmp_path, "this") == request
    assert read_stop_request(tmp_path, "another") is None
    remove_stop_request(tmp_path)
    assert read_stop_request(tmp_path, "this") is None
    remove_stop_request(tmp_path)


def test_a_file_that_somebody_else_has_put_there_has_no_effect(tmp_path: Path) -> None:
    (tmp_path / ".stop").write_text("stop!")
    assert read_stop_request(tmp_path, "this") is None


def test_a_rank_knows_by_its_new_parent_that_its_launcher_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ancestors = Ancestors()
    assert not ancestors.parent_is_gone()
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert ancestors.parent_is_gone()
    assert ancestors.describe_end() == f"the launcher (process {ancestors.parent}) has ended"
