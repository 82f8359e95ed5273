"""The outcome of a run, determined from the statuses of its ranks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rank_places import place_of

from evenpack.errors import EXIT_BAD_INPUT, EXIT_STOPPED
from evenpack.launcher.processes.ranks import Failure, RankStatus, State
from evenpack.launcher.processes.supervise import LaunchResult, describe_exit, launch_result


def rank(number: int, state: State, *, exit_code: int | None = None, error: str | None = None) -> RankStatus:
    place = place_of(number, ranks=2, each=2)
    begun = RankStatus.starting("run", place)
    return begun if exit_code is None else begun.ended(state, exit_code=exit_code, step=9, error=error)


def verdict(*statuses: RankStatus, failure: Failure | None = None, code: int = 0, ranks: int = 2) -> LaunchResult:
    by_rank = {status.rank: status for status in statuses}
    return launch_result(by_rank, failure, ranks=ranks, launcher_code=code, folder=Path("out/ranks"))


def test_a_run_whose_ranks_all_finish_has_finished() -> None:
    result = verdict(rank(0, "finished", exit_code=0), rank(1, "finished", exit_code=0))
    assert result == LaunchResult(state="finished", exit_code=0, message="", error=None)


def test_a_stopped_run_has_its_own_code_whatever_deepspeed_returns() -> None:
    result = verdict(rank(0, "stopped", exit_code=75), rank(1, "stopped", exit_code=75), code=-15)
    assert (result.state, result.exit_code) == ("stopped", EXIT_STOPPED)
    assert "after step 9" in result.message


def test_a_run_that_stopped_before_all_its_ranks_had_started_is_a_stopped_one() -> None:
    early = replace(rank(0, "stopped", exit_code=75), step=None)
    for result in (verdict(early, code=EXIT_STOPPED), verdict(early, replace(early, rank=1), code=-15)):
        assert (result.state, result.exit_code) == ("stopped", EXIT_STOPPED)
        assert "before the first step" in result.message
    killed_by_launcher = verdict(early, code=256 - 9)
    assert (killed_by_launcher.state, killed_by_launcher.exit_code) == ("failed", 1)


def test_a_rank_that_died_without_a_word_is_named_though_deepspeed_returns_0() -> None:
    result = verdict(rank(0, "finished", exit_code=0), rank(1, "running"), code=0)
    assert result.exit_code == 1
    assert result.message.startswith("rank 1 on")
    assert "exited without an error message (exit code 0)" in result.message


def test_the_signal_comes_from_the_code_of_deepspeed() -> None:
    result = verdict(rank(0, "running"), rank(1, "finished", exit_code=0), code=247)
    assert "rank 0 on" in result.message
    assert "killed by SIGKILL; the kernel does that when memory runs out" in result.message


def test_the_rank_that_failed_first_is_named_and_not_its_victims() -> None:
    victim = rank(0, "failed", exit_code=1, error="connection closed")
    first = Failure.of(rank(1, "failed", exit_code=1, error="ZeroDivisionError: by zero"))
    result = verdict(victim, rank(1, "failed", exit_code=1, error="ZeroDivisionError: by zero"), failure=first, code=1)
    assert (result.exit_code, result.state) == (1, "failed")
    assert "rank 1 on" in result.message
    assert result.message.endswith("failed: ZeroDivisionError: by zero")


def test_an_error_of_the_user_that_all_ranks_have_needs_no_more_words() -> None:
    both = [rank(number, "failed", exit_code=EXIT_BAD_INPUT, error="wrong key") for number in (0, 1)]
    expected = LaunchResult(state="failed", exit_code=EXIT_BAD_INPUT, message="", error="wrong key")
    assert verdict(*both, code=2) == expected


def test_an_error_of_the_user_on_one_rank_names_it() -> None:
    first = rank(1, "failed", exit_code=EXIT_BAD_INPUT, error="truncated")
    result = verdict(rank(0, "failed", exit_code=137, error="ended because"), first, failure=Failure.of(first), code=2)
    assert result.exit_code == EXIT_BAD_INPUT
    assert "rank 1 on" in result.message


@pytest.mark.parametrize("last", [{"exit_code": 137, "error": "ended because"}, {}])
def test_without_a_record_of_the_first_failure_a_lost_connection_is_not_taken_for_it(last: dict[str, Any]) -> None:
    """On a full disk no new file can be written; statuses have room."""
    victim = rank(0, "failed", exit_code=1, error="RuntimeError: [gloo] Connection closed by peer")
    first = rank(1, "failed", exit_code=EXIT_BAD_INPUT, error="cannot write to metrics.jsonl: No space left on device")
    other = replace(rank(0, "failed", **last) if last else rank(0, "running"), rank=2)
    for statuses in ((victim, first, other), (other, first, victim)):
        result = verdict(*statuses, code=2, ranks=3)
        assert result.exit_code == EXIT_BAD_INPUT
        assert result.message.endswith("cannot write to metrics.jsonl: No space left on device")


def test_ranks_that_have_left_no_word_where_it_is_looked_for_are_no_success() -> None:
    result = verdict(rank(0, "finished", exit_code=0), ranks=3)
    assert result.exit_code == 1
    assert "no status of rank 1, 2" in result.message


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (0, "exit code 0"),
        (1, "exit code 1"),
        (-15, "killed by SIGTERM"),
        (245, "killed by SIGSEGV"),
        (249, "killed by SIGBUS; the kernel does that when a file that is mapped was cut short, or its disk fails"),
        (75, "exit code 75"),
        (255, "exit code 255"),
        (-1, "killed by SIGHUP"),
        (200, "exit code 200"),
    ],
)
def test_codes_of_deepspeed_are_translated(code: int, expected: str) -> None:
    assert describe_exit(code) == expected
