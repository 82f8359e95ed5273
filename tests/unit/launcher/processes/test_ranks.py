"""Ranks record their status, and which one failed first."""

import base64
import errno
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rank_places import place_of

from evenpack.engine.ownership import require_owned
from evenpack.errors import RunError
from evenpack.launcher.processes import ranks
from evenpack.launcher.processes.holding import held_as_writer, held_output_dir, is_held
from evenpack.launcher.processes.identities import LaunchToken, ProcessIdentity, RankPlace
from evenpack.launcher.processes.ranks import Failure, RankFolder, RankStatus, running_run

ALONE = RankPlace.of_environment({})


def status(run_id: str = "run", rank: int = 0) -> RankStatus:
    place = place_of(rank, ranks=4, each=4)
    return RankStatus.starting(run_id, place)


def folder(tmp_path: Path, run_id: str = "run") -> RankFolder:
    found = RankFolder(tmp_path, run_id)
    found.path.mkdir(exist_ok=True)
    return found


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (0, 1, 0, 1, False)),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_SIZE": "4"}, (5, 8, 1, 4, True)),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, (5, 8, 1, 4, True)),
        (
            {
                "OMPI_COMM_WORLD_RANK": "2",
                "OMPI_COMM_WORLD_SIZE": "6",
                "OMPI_COMM_WORLD_LOCAL_RANK": "0",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            },
            (2, 6, 0, 2, True),
        ),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}, (1, 2, 1, 2, True)),
    ],
)
def test_the_place_comes_from_whichever_launcher_there_was(
    environment: dict[str, str], expected: tuple[int, int, int, int, bool]
) -> None:
    place = RankPlace.of_environment(environment)
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size, place.launched) == expected


def test_the_ranks_of_a_machine_are_numbered_one_after_another() -> None:
    place = place_of(9, ranks=12, each=4)
    assert list(place.local_ranks()) == [8, 9, 10, 11]


WORLD = base64.urlsafe_b64encode(json.dumps({"a": [0, 1], "b": [0, 1, 2], "c": [0]}).encode()).decode()
LAUNCHER = ["python", "-u", "-m", "deepspeed.launcher.launch", f"--world_info={WORLD}", "--node_rank=1"]


@pytest.mark.parametrize(("rank", "local_rank"), [(2, 2), (3, 0), (4, 1)])
def test_the_ranks_of_a_machine_are_known_where_machines_have_unequal_slots(rank: int, local_rank: int) -> None:
    """DeepSpeed numbers them by the rank modulo the machine's ranks."""
    environment = {"RANK": str(rank), "WORLD_SIZE": "6", "LOCAL_RANK": str(local_rank), "LOCAL_SIZE": "3"}
    place = RankPlace.of_environment({**environment, "CROSS_RANK": "1"}, LAUNCHER)
    assert list(place.local_ranks()) == [2, 3, 4]


@pytest.mark.parametrize("command", [["torchrun"], LAUNCHER[:4], [*LAUNCHER[:4], "--world_info=None"]])
def test_a_launcher_that_does_not_say_the_slots_numbers_ranks_by_the_machine(command: list[str]) -> None:
    environment = {"RANK": "3", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "CROSS_RANK": "1"}
    assert list(RankPlace.of_environment(environment, command).local_ranks()) == [2, 3]


def test_a_process_is_alive_until_it_ends_and_a_zombie_is_not() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = ProcessIdentity.of(process.pid)
    assert identity is not None
    assert identity.is_alive()
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # ended, not yet reaped: a zombie
    assert ProcessIdentity.of(process.pid) == identity
    assert not identity.is_alive()
    process.communicate()
    assert not identity.is_alive()
    assert ProcessIdentity.of(process.pid) is None


def test_another_process_with_the_same_pid_is_not_the_same() -> None:
    assert not ProcessIdentity(pid=os.getpid(), session=os.getsid(0) + 1).is_alive()


def test_a_token_survives_the_command_line_whatever_the_host_is_called() -> None:
    token = LaunchToken(host="fe80::1", machine="m-1", process=ProcessIdentity(pid=7, session=8), run_id="abc")
    assert LaunchToken.parse(str(token)) == token
    with pytest.raises(ValueError, match="not enough values"):
        LaunchToken.parse("abc")


def test_a_launcher_is_looked_for_on_its_own_machine_alone() -> None:
    """Two machines, or containers, may have one host name."""
    token = LaunchToken.of_this_process()
    assert token.process_if_here() == token.process
    assert replace(token, machine="another").process_if_here() is None
    assert replace(token, host="another").process_if_here() is None


def test_a_status_is_read_as_it_was_written(tmp_path: Path) -> None:
    begun = status(rank=3)
    folder(tmp_path).write_status(begun)
    assert folder(tmp_path).read_status(3) == begun
    ended = begun.ended("stopped", exit_code=75, step=12)
    folder(tmp_path).write_status(ended)
    assert folder(tmp_path).read_status(3) == ended
    assert folder(tmp_path).read_statuses() == {3: ended}


def test_what_another_run_has_left_is_not_seen_and_removed_when_asked_to(tmp_path: Path) -> None:
    earlier = folder(tmp_path, "earlier")
    earlier.write_status(status("earlier"))
    earlier.claim_failure(Failure.of(status("earlier").ended("failed", exit_code=1, error="x")))
    now = folder(tmp_path)
    now.write_status(status(rank=1))
    assert list(now.read_statuses()) == [1]
    assert now.read_failure() is None
    now.remove_earlier()
    assert sorted(path.name for path in now.path.iterdir()) == ["rank_1.json"]


def test_a_half_written_status_is_no_status(tmp_path: Path) -> None:
    (folder(tmp_path).path / "rank_0.json").write_text('{"run_id": "run", "ra')
    assert folder(tmp_path).read_status(0) is None
    assert folder(tmp_path).read_statuses() == {}


NONSENSE = ("", "{", "[1]", "7", "null", '{"run_id": "run"}', '{"run_id": "run", "process": 3}', "\xff", "[" * 99_999)


@pytest.mark.parametrize("text", NONSENSE)
def test_files_of_somebody_elses_making_say_nothing(tmp_path: Path, text: str) -> None:
    ranks = folder(tmp_path)
    for name in ("rank_7.json", "rank_x.json", "rank_.json", "failure_run.json"):
        (ranks.path / name).write_text(text, encoding="latin-1")
    ranks.write_status(status(rank=1))
    assert ranks.read_status(7) is None
    assert list(ranks.read_statuses()) == [1]
    assert ranks.read_failure() is None


def test_what_cannot_be_removed_is_named(tmp_path: Path) -> None:
    (folder(tmp_path).path / "rank_7.json").mkdir()
    with pytest.raises(RunError, match=r"rank_7\.json cannot be removed: Is a directory; move it away"):
        folder(tmp_path).remove_earlier()


def test_the_first_failure_stays_whoever_claims_one_later(tmp_path: Path) -> None:
    first = Failure.of(status(rank=2).ended("failed", exit_code=1, error="first"))
    later = Failure.of(status(rank=0).ended("failed", exit_code=1, error="later"))
    assert folder(tmp_path).claim_failure(first) == first
    assert folder(tmp_path).claim_failure(later) == first
    assert folder(tmp_path).read_failure() == first
    assert len(list(folder(tmp_path).path.iterdir())) == 1


def test_an_output_directory_is_held_by_one_run_at_a_time(tmp_path: Path) -> None:
    with (
        held_output_dir(tmp_path / "out"),
        pytest.raises(RunError, match="another run is writing into"),
        held_output_dir(tmp_path / "out", patience_seconds=0.3),
    ):
        pass
    with held_output_dir(tmp_path / "out", patience_seconds=0.0):
        pass


def test_whether_a_run_writes_into_a_directory_can_be_asked_without_stopping_it(tmp_path: Path) -> None:
    assert not is_held(tmp_path / "nothing")
    with held_output_dir(tmp_path / "out"):
        assert is_held(tmp_path / "out")
    assert not is_held(tmp_path / "out")
    with held_output_dir(tmp_path / "out", patience_seconds=0.0):
        pass


def test_an_output_directory_held_by_a_process_is_free_once_it_is_killed(tmp_path: Path) -> None:
    script = (
        "import pathlib, sys; from evenpack.launcher.processes.holding import held_output_dir\n"
        "with held_output_dir(pathlib.Path(sys.argv[1])): print('held', flush=True); input()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(RunError), held_output_dir(tmp_path, patience_seconds=0.0):
        pass
    holder.kill()
    holder.communicate()
    with held_output_dir(tmp_path, patience_seconds=0.0):
        pass


def test_an_output_directory_that_cannot_be_made_is_an_error_of_the_user() -> None:
    with pytest.raises(RunError, match="/dev/null/out cannot be written"), held_output_dir(Path("/dev/null/out")):
        pass


def test_stacks_of_an_earlier_run_are_removed(tmp_path: Path) -> None:
    run = folder(tmp_path)
    (run.path / "stack_0.txt").write_text("old")
    run.remove_earlier()
    assert list(run.path.iterdir()) == []


@pytest.mark.parametrize("length", [20, 100_000])
def test_the_end_of_a_rank_is_recorded_on_a_full_disk_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    folder(tmp_path).write_status(status())
    size = (tmp_path / "ranks" / "rank_0.json").stat().st_size

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(ranks, "write_text", refuse)
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *given: pwrite(*given) if len(given[1]) <= size else refuse())
    ended = status().ended("failed", exit_code=2, error="no room: ü" + "x" * length)
    folder(tmp_path).write_status(ended)
    found = folder(tmp_path).read_status(0)
    assert found is not None
    assert found.exit_code == 2
    assert found.error is not None
    assert ended.error is not None
    assert ended.error.startswith(found.error)
    assert found.error.startswith("no room: ü")
    assert (tmp_path / "ranks" / "rank_0.json").stat().st_size == size
    with pytest.raises(OSError, match="No space left"):
        folder(tmp_path).write_status(status())


def test_what_killed_processes_have_not_finished_goes_with_the_next_start(tmp_path: Path) -> None:
    ranks_dir = folder(tmp_path).path
    left = [
        tmp_path / ".run.json.12.partial",
        tmp_path / ".metrics.jsonl.7.partial",
        ranks_dir / ".rank_1.json.9.partial",
    ]
    others = [tmp_path / ".stop.3.partial", tmp_path / "notes.partial"]
    for path in (*left, *others):
        path.write_text("{")
    folder(tmp_path).remove_earlier()
    assert [path.exists() for path in (*left, *others)] == [False] * 3 + [True] * 2


HOLD = """
import os, pathlib, signal, sys
from evenpack.launcher.processes.holding import held_as_writer, held_output_dir
with held_output_dir(pathlib.Path(sys.argv[1])), held_as_writer(pathlib.Path(sys.argv[1])):
    os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.mark.parametrize("hold", [held_output_dir, held_as_writer])
def test_a_stopped_process_that_holds_the_directory_is_named_and_left_alone(
    tmp_path: Path, hold: Callable[..., Any]
) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)]) as holder:
        os.waitid(os.P_PID, holder.pid, os.WSTOPPED | os.WNOWAIT)
        with pytest.raises(RunError) as caught, hold(tmp_path, patience_seconds=0.0):
            pass
        assert f"another run is writing into {tmp_path}: process {holder.pid} on {socket.gethostname()}" in str(
            caught.value
        )
        assert f"is stopped (kill -CONT {holder.pid} wakes it" in str(caught.value)
        assert holder.poll() is None
        holder.kill()


def test_a_process_writes_no_more_once_another_has_claimed_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_owned(tmp_path)  # nobody's, as in a test or another program
    with held_as_writer(tmp_path):
        require_owned(tmp_path)
        (tmp_path / ".writer").write_text(str(LaunchToken.of_this_process()))
        with pytest.raises(RunError, match="another start of the run has taken"):
            require_owned(tmp_path)
        (tmp_path / ".writer").unlink()
        with pytest.raises(RunError, match=r"cannot be read: No such file"):
            require_owned(tmp_path)
    require_owned(tmp_path)
    monkeypatch.setattr(os, "pwrite", lambda *_: exec("raise OSError(28, 'No space left on device')"))
    with pytest.raises(RunError, match=r"\.writer cannot be written: No space left"), held_as_writer(tmp_path):
        pass


def test_status_files_are_plain_json(tmp_path: Path) -> None:
    folder(tmp_path).write_status(status())
    values = json.loads((tmp_path / "ranks" / "rank_0.json").read_text())
    assert values["process"]["pid"] == os.getpid()
    assert values["state"] == "running"


def test_a_run_whose_ranks_were_killed_does_not_go_on(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
    process = ProcessIdentity(pid=ended.pid, session=ended.pid)
    ended.wait()
    killed = replace(status(), process=process)
    folder(tmp_path).write_status(killed)
    with pytest.raises(RunError, match=rf"rank 0 \(process {ended.pid}\) was killed"):
        running_run(tmp_path)
    with held_output_dir(tmp_path):
        assert running_run(tmp_path) == "run"
    folder(tmp_path).write_status(status())
    assert running_run(tmp_path) == "run", "a file system without locks"
    folder(tmp_path).write_status(replace(killed, host="another machine"))
    assert running_run(tmp_path) == "run", "nobody can look for its process from here"
