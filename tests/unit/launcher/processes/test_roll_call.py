"""The rank that is gone is named, and not the one that has lost its connection to it."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
from rank_places import place_of

from evenpack.launcher.processes import ranks
from evenpack.launcher.processes.ranks import Failure, RankFolder, RankStatus, RollCall, is_lost_connection


class DistError(RuntimeError):
    """Named as torch's."""


class DistBackendError(DistError):
    """Named as torch's."""


@pytest.fixture
def folder(tmp_path: Path) -> RankFolder:
    """The folder of a run of four ranks on two machines, whose guards look at the roll call once."""
    found = RankFolder(tmp_path, "now")
    found.path.mkdir()
    for rank in range(4):
        place = place_of(rank, ranks=4, each=2)
        found.write_status(replace(RankStatus.starting("now", place), host=f"node{rank // 2 + 1}"))
    return found


def called_by_0(folder: RankFolder, *answering: int, monkeypatch: pytest.MonkeyPatch) -> Failure | None:
    """Lets rank 0 call the roll, and returns what it finds when `answering` ranks have answered."""
    monkeypatch.setattr(ranks, "ROLL_CALL_SECONDS", 0.3)
    guards = {rank: RollCall(folder) for rank in answering}

    def answer_and_read() -> Failure | None:
        for rank, guard in guards.items():
            guard.answer(rank)
        return folder.read_failure()

    return RollCall(folder).call(0, 4, answer_and_read)


def test_the_rank_that_does_not_answer_is_named_with_its_machine(
    folder: RankFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    failure = called_by_0(folder, 0, 1, 3, monkeypatch=monkeypatch)
    assert failure is not None
    assert folder.read_failure() == failure
    assert failure.describe() == (
        "rank 2 on node2 failed: others have lost their connection to it; it does not answer, though its machine does: "
        "it was killed or stopped"
    )


def test_a_machine_that_is_gone_is_named(folder: RankFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    failure = called_by_0(folder, 0, 1, monkeypatch=monkeypatch)
    assert failure is not None
    assert failure.describe().startswith("rank 2 on node2 failed: ")
    assert "none of the ranks 2 to 3 of its machine answers: the machine is down or not reachable" in failure.describe()


def test_nobody_is_named_if_all_answer(folder: RankFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "ROLL_CALL_SECONDS", 600.0)
    assert called_by_0(folder, 0, 1, 2, 3, monkeypatch=monkeypatch) is None
    assert folder.read_failure() is None


def test_a_rank_that_has_ended_by_itself_is_not_missed(folder: RankFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    status = folder.read_status(2)
    assert status is not None
    folder.write_status(status.ended("finished", exit_code=0, step=9))
    assert called_by_0(folder, 0, 1, 3, monkeypatch=monkeypatch) is None


def test_a_rank_that_never_started_is_named_only_if_all_others_answer(
    folder: RankFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder.path / "rank_1.json").unlink()
    failure = called_by_0(folder, 0, 3, monkeypatch=monkeypatch)
    assert failure is not None
    assert failure.rank == 2
    folder._failure_file.unlink()
    failure = called_by_0(folder, 0, 2, 3, monkeypatch=monkeypatch)
    assert failure is not None
    assert failure.describe().startswith("rank 1 on an unknown machine failed: it has not started")


def test_what_another_rank_records_meanwhile_is_the_failure(
    folder: RankFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = Failure(run_id="now", rank=3, host="node2", error=None, exit_code=None, at=time.time())
    folder.claim_failure(recorded)
    assert called_by_0(folder, monkeypatch=monkeypatch) == recorded
    assert (folder.path / "present_0_now").exists(), "the one that calls is there"


def test_ranks_that_their_launcher_ends_during_the_roll_call_leave_who_had_answered(folder: RankFolder) -> None:
    assert RollCall(folder).unanswered(4) is None
    (folder.path / "roll_call_now").touch()
    for rank in (0, 1, 3):
        RollCall(folder).answer(rank)
    failure = RollCall(folder).unanswered(4)
    assert failure is not None
    assert (failure.rank, failure.host) == (2, "node2")
    assert failure.error == "others have lost their connection to it; the launcher has ended all ranks since"
    (folder.path / "present_3_now").unlink()
    failure = RollCall(folder).unanswered(4)
    assert failure is not None
    assert "lost their connection to it, if it was not one of 3; the launcher" in str(failure.error)


def test_the_roll_call_of_an_earlier_run_is_neither_answered_nor_kept(folder: RankFolder) -> None:
    earlier = folder.path / "roll_call_earlier"
    earlier.touch()
    RollCall(folder).answer(0)
    assert not list(folder.path.glob("present_*"))
    (folder.path / "roll_call_now").touch()
    RollCall(folder).answer(0)
    folder.remove_earlier()
    assert not earlier.exists()
    assert (folder.path / "roll_call_now").exists()
    assert [path.name for path in folder.path.glob("present_*")] == ["present_0_now"]


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (ConnectionResetError("reset"), True),
        (RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:36012"), True),
        (RuntimeError("[../gloo/transport/tcp/pair.cc:534] Read error [10.0.0.2]:1: Connection reset by peer"), True),
        (RuntimeError("[../gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms for recv"), True),
        (DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:1: unhandled system error"), True),
        (RuntimeError("NCCL communicator was aborted: ncclRemoteError: remote process exited"), True),
        (ZeroDivisionError("division by zero"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (OSError(28, "No space left on device"), False),
    ],
)
def test_errors_that_only_follow_from_the_end_of_another_rank_are_known(error: Exception, is_lost: bool) -> None:
    assert is_lost_connection(error) == is_lost


def test_a_failure_that_could_not_be_recorded_is_found_in_the_status_of_its_rank(
    folder: RankFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk no new file can be written; the network has not failed."""
    status = folder.read_status(2)
    assert status is not None
    folder.write_status(status.ended("failed", exit_code=2, error="No space left on device"))
    failure = called_by_0(folder, 0, 1, 3, monkeypatch=monkeypatch)
    assert failure is not None
    assert (failure.rank, failure.exit_code, failure.error) == (2, 2, "No space left on device")
