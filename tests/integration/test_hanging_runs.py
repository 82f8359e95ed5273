"""Runs that hang: the rank that holds them up is named, and they end or go on."""

import signal
import time

import pytest
from fake_runs import HANGS_SECONDS, FakeRun, training, wait_until

TIMEOUT = ("run.hang_timeout_seconds=10", "run.start_timeout_seconds=20")


@pytest.mark.slow
@training("loop")
def test_a_stopped_rank_ends_the_run_by_name(fake_run: FakeRun) -> None:
    process = fake_run.launch(*TIMEOUT)
    fake_run.wait_for("step")
    pid = fake_run.pid(1)
    fake_run.signal(1, signal.SIGSTOP)
    assert process.wait(timeout=HANGS_SECONDS) == 1
    message = fake_run.result()["message"]
    assert message.startswith("rank 1 on ")
    assert "failed: no progress for " in message
    assert f"it does not answer: process {pid} is stopped (SIGSTOP); SIGCONT makes it go on" in message
    fake_run.wait_until_nothing_lives()


@pytest.mark.slow
@training("loop")
def test_a_rank_that_wakes_before_the_time_out_goes_on(fake_run: FakeRun) -> None:
    process = fake_run.launch("run.hang_timeout_seconds=20", "run.start_timeout_seconds=20")
    step = int(fake_run.wait_for("step"))
    fake_run.signal(1, signal.SIGSTOP)
    time.sleep(12.0)  # half the time-out, and longer than a rank may be silent
    fake_run.signal(1, signal.SIGCONT)
    wait_until(lambda: int(fake_run.wait_for("step")) > step + 100, "the run to go on")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=HANGS_SECONDS) == 75


@training("wait_on_rank_1")
def test_ranks_without_a_supervisor_name_the_one_that_they_wait_for(fake_run: FakeRun) -> None:
    ranks = fake_run.start_ranks(2, *TIMEOUT)
    assert all(rank.wait(timeout=HANGS_SECONDS) != 0 for rank in ranks)
    failure = fake_run.failure()
    assert failure["rank"] == 1
    assert "step 3, computing gradients; 1 of 2 ranks are further and wait for it" in failure["error"]
    stack = fake_run.output_dir / "ranks" / "stack_1.txt"
    assert "wait_for_a_broken_disk" in stack.read_text()
    assert f"where it waits: {stack}" in failure["error"]


@pytest.mark.slow
@training("compile_on_rank_1")
def test_ranks_that_wait_for_a_compilation_longer_than_the_time_out_go_on(fake_run: FakeRun) -> None:
    process = fake_run.launch("run.hang_timeout_seconds=6")
    assert process.wait(timeout=HANGS_SECONDS) == 0


@training("compile_on_rank_1")
def test_a_compilation_that_does_not_end_has_a_limit_of_its_own(fake_run: FakeRun) -> None:
    environment = fake_run.environment(FAKE_FOREVER="1")
    process = fake_run.launch("run.hang_timeout_seconds=2", "run.start_timeout_seconds=8", environment=environment)
    assert process.wait(timeout=HANGS_SECONDS) == 1
    failure = fake_run.failure()
    assert failure["rank"] == 1
    assert "step 3, computing gradients (compiling)" in failure["error"]
    assert "which run.start_timeout_seconds limits to 8 s" in failure["error"]


@training("loop")
def test_a_stopped_rank_is_killed_by_its_neighbours_where_no_supervisor_is(fake_run: FakeRun) -> None:
    ranks = fake_run.start_ranks(2, "run.hang_timeout_seconds=6", "run.start_timeout_seconds=6")
    fake_run.wait_for("step")
    fake_run.signal(1, signal.SIGSTOP)
    codes = [rank.wait(timeout=HANGS_SECONDS) for rank in ranks]
    assert codes[0] in (1, 128 + signal.SIGKILL)  # by its lost connection, or by its guard
    assert codes[1] == -signal.SIGKILL
    assert fake_run.failure()["rank"] == 1
