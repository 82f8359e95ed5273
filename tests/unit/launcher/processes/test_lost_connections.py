"""The rank that is gone is named, and not the one that has lost its connection to it."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from rank_places import place_of

from evenpack.engine.activity import Doing
from evenpack.launcher.processes import hangs
from evenpack.launcher.processes.hangs import Heartbeat, find_first_stopped, find_lost_rank
from evenpack.launcher.processes.ranks import Failure, RankFolder, RankStatus, is_lost_connection


class DistError(RuntimeError):
    """Named as torch's."""


class DistBackendError(DistError):
    """Named as torch's."""


@pytest.fixture
def folder(tmp_path: Path) -> RankFolder:
    """The folder of a run of four ranks on two machines, which have written a heartbeat some time ago."""
    found = RankFolder(tmp_path, "now")
    found.path.mkdir()
    for rank in range(4):
        place = place_of(rank, ranks=4, each=2)
        found.write_status(replace(RankStatus.starting("now", place), host=f"node{rank // 2 + 1}"))
        os.utime(found.status_file(rank), (0.0, 0.0))
    return found


def guard_of(folder: RankFolder, rank: int) -> Heartbeat:
    status = folder.read_status(rank)
    assert status is not None
    return Heartbeat(folder, status, limits=None, doing=Doing(), clock=lambda: 0.0)


def seen_by_0(folder: RankFolder, *well: int, monkeypatch: pytest.MonkeyPatch) -> Failure | None:
    """Lets rank 0 lose a connection, and returns what it finds while guards of the ranks that are `well` look."""
    monkeypatch.setattr(hangs, "LOST_SECONDS", 0.3)
    guards = [guard_of(folder, rank) for rank in well]
    for rank, guard in zip(well, guards, strict=True):
        guard.keep_up()  # no other is due, but for the loss
        os.utime(folder.status_file(rank), (0.0, 0.0))

    def look() -> Failure | None:
        for guard in guards:
            guard.keep_up()
        return folder.read_failure()

    return find_lost_rank(folder, 0, 4, look)


def test_the_rank_whose_heartbeat_has_stopped_is_named_with_its_machine(
    folder: RankFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    failure = seen_by_0(folder, 0, 1, 3, monkeypatch=monkeypatch)
    assert failure is not None
    assert folder.read_failure() == failure
    assert failure.describe() == (
        "rank 2 on node2 failed: others have lost their connection to it; it does not answer, though its machine does: "
        "it was killed or stopped"
    )


def test_a_machine_that_is_gone_is_named(folder: RankFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    failure = seen_by_0(folder, 0, 1, monkeypatch=monkeypatch)
    assert failure is not None
    assert failure.describe().startswith("rank 2 on node2 failed: ")
    assert "none of the ranks 2 to 3 of its machine answers: the machine is down or not reachable" in failure.describe()


def test_nobody_is_named_if_all_are_well(folder: RankFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hangs, "LOST_SECONDS", 600.0)
    assert seen_by_0(folder, 0, 1, 2, 3, monkeypatch=monkeypatch) is None
    assert folder.read_failure() is None


def test_a_rank_that_has_ended_by_itself_is_not_missed(folder: RankFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    status = folder.read_status(2)
    assert status is not None
    folder.write_status(status.ended("finished", exit_code=0, step=9))
    assert seen_by_0(folder, 0, 1, 3, monkeypatch=monkeypatch) is None


def test_a_rank_that_never_started_is_named_only_if_all_others_are_well(
    folder: RankFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.status_file(1).unlink()
    failure = seen_by_0(folder, 0, 3, monkeypatch=monkeypatch)
    assert failure is not None
    assert failure.rank == 2
    folder._failure_file.unlink()
    folder.lost_file.unlink()
    failure = seen_by_0(folder, 0, 2, 3, monkeypatch=monkeypatch)
    assert failure is not None
    assert failure.describe().startswith("rank 1 on an unknown machine failed: it has not started")


def test_what_another_rank_records_meanwhile_is_the_failure(
    folder: RankFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = Failure(run_id="now", rank=3, host="node2", error=None, exit_code=None)
    folder.claim_failure(recorded)
    assert seen_by_0(folder, monkeypatch=monkeypatch) == recorded


def test_the_reporter_is_never_named_on_a_full_disk_either(folder: RankFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "touch", refuse)
    failure = seen_by_0(folder, monkeypatch=monkeypatch)
    assert failure is not None
    assert failure.rank == 1


def test_ranks_that_their_launcher_ends_after_a_lost_connection_leave_who_was_well(folder: RankFolder) -> None:
    assert find_first_stopped(folder, 4) is None
    folder.lost_file.touch()
    for rank in (0, 1, 3):
        os.utime(folder.status_file(rank))
    failure = find_first_stopped(folder, 4)
    assert failure is not None
    assert (failure.rank, failure.host) == (2, "node2")
    assert failure.error == "others have lost their connection to it; the launcher has ended all ranks since"
    os.utime(folder.status_file(3), (0.0, 0.0))
    failure = find_first_stopped(folder, 4)
    assert failure is not None
    assert "lost their connection to it, if it was not one of 3; the launcher" in str(failure.error)


def test_the_note_of_an_earlier_run_is_neither_answered_nor_kept(folder: RankFolder) -> None:
    earlier = RankFolder(folder.output_dir, "earlier").lost_file
    earlier.touch()
    guard = guard_of(folder, 0)
    guard.keep_up()
    os.utime(folder.status_file(0), (0.0, 0.0))
    guard.keep_up()
    assert folder.status_file(0).stat().st_mtime == 0.0
    folder.lost_file.touch()
    guard.keep_up()
    assert folder.status_file(0).stat().st_mtime > 0.0
    folder.remove_earlier()
    assert not earlier.exists()
    assert folder.lost_file.exists()


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
    failure = seen_by_0(folder, 0, 1, 3, monkeypatch=monkeypatch)
    assert failure is not None
    assert (failure.rank, failure.exit_code, failure.error) == (2, 2, "No space left on device")
