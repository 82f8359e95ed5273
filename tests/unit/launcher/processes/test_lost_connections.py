"""The rank that is gone is named, and not the one that has lost its connection to it."""

from dataclasses import replace
from pathlib import Path

import pytest
from rank_places import place_of

from evenpack.engine.activity import Doing
from evenpack.launcher.processes import hangs
from evenpack.launcher.processes.hangs import Heartbeat, find_lost_rank
from evenpack.launcher.processes.ranks import Failure, RankFolder, RankStatus, is_lost_connection


class DistError(RuntimeError):
    """Named as torch's."""


class DistBackendError(DistError):
    """Named as torch's."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RankFolder:
    """The folder of a run of four ranks on two machines, which have written a heartbeat."""
    monkeypatch.setattr(hangs, "LOST_SECONDS", 0.3)
    found = RankFolder(tmp_path, "now")
    found.path.mkdir()
    for rank in range(4):
        place = place_of(rank, ranks=4, each=2)
        found.write_status(replace(RankStatus.starting("now", place), host=f"node{rank // 2 + 1}"))
    return found


def seen_by_0(folder: RankFolder, *well: int) -> Failure | None:
    """Lets rank 0 lose a connection, and returns what it finds while ranks that are `well` go on with heartbeats."""
    statuses = {rank: status for rank, status in folder.read_statuses().items() if rank in well}
    guards = [Heartbeat(folder, status, limits=None, doing=Doing()) for status in statuses.values()]

    def look() -> Failure | None:
        for guard in guards:
            guard.keep_up()
        return folder.read_failure()

    return find_lost_rank(folder, 0, 4, look)


def test_the_rank_whose_heartbeat_has_stopped_is_named_with_its_machine(folder: RankFolder) -> None:
    status = folder.read_status(2)
    assert status is not None
    failure = seen_by_0(folder, 0, 1, 3)
    assert failure is not None
    assert folder.read_failure() == failure
    assert failure.describe() == (
        "rank 2 on node2 failed: others have lost their connection to it; it does not answer, though its machine does: "
        f"it was killed or stopped (process {status.process.pid})"
    )


def test_a_machine_that_is_gone_is_named(folder: RankFolder) -> None:
    failure = seen_by_0(folder, 0, 1)
    assert failure is not None
    assert failure.describe().startswith("rank 2 on node2 failed: ")
    assert "none of the ranks 2 to 3 of its machine answers: the machine is down or not reachable" in failure.describe()


def test_nobody_is_named_if_all_are_well(folder: RankFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hangs, "LOST_SECONDS", 600.0)
    assert seen_by_0(folder, 0, 1, 2, 3) is None
    assert folder.read_failure() is None


def test_a_rank_that_has_ended_by_itself_is_not_missed(folder: RankFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hangs, "LOST_SECONDS", 600.0)
    status = folder.read_status(2)
    assert status is not None
    folder.write_status(status.ended("finished", exit_code=0, step=9))
    assert seen_by_0(folder, 0, 1, 3) is None


def test_a_rank_that_never_started_is_named_only_if_all_others_are_well(folder: RankFolder) -> None:
    folder.status_file(1).unlink()
    failure = seen_by_0(folder, 0, 3)
    assert failure is not None
    assert failure.rank == 2
    folder._failure_file.unlink()
    failure = seen_by_0(folder, 0, 2, 3)
    assert failure is not None
    assert failure.describe().startswith("rank 1 on an unknown machine failed: it has not started")


def test_a_rank_that_starts_meanwhile_is_well(folder: RankFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hangs, "LOST_SECONDS", 600.0)
    status = folder.read_status(3)
    assert status is not None
    folder.status_file(3).unlink()
    looks = []

    def look() -> None:
        looks.append(len(looks))
        for rank in (1, 2):
            beating = folder.read_status(rank)
            assert beating is not None
            folder.write_status(replace(beating, beats=beating.beats + 1))
        if len(looks) == 2:
            folder.write_status(status)

    assert find_lost_rank(folder, 0, 4, look) is None
    assert len(looks) == 2


def test_what_another_rank_records_meanwhile_is_the_failure(folder: RankFolder) -> None:
    recorded = Failure(run_id="now", rank=3, host="node2", error=None, exit_code=None)
    folder.claim_failure(recorded)
    assert seen_by_0(folder) == recorded


def test_the_reporter_is_never_named(folder: RankFolder) -> None:
    failure = seen_by_0(folder)
    assert failure is not None
    assert failure.rank == 1


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


def test_a_failure_that_could_not_be_recorded_is_found_in_the_status_of_its_rank(folder: RankFolder) -> None:
    """On a full disk no new file can be written; the network has not failed."""
    status = folder.read_status(2)
    assert status is not None
    folder.write_status(status.ended("failed", exit_code=2, error="No space left on device"))
    failure = seen_by_0(folder, 0, 1, 3)
    assert failure is not None
    assert (failure.rank, failure.exit_code, failure.error) == (2, 2, "No space left on device")
