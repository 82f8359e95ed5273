"""The processes of a run, with other programs in place of `deepspeed`."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_runs import HERE, FakeRun, wait_until

from evenpack.launch_environment import LOCAL_RANK, LOCAL_WORLD_SIZE, MACHINE, MAX_RESTARTS, RANK, WORLD_SIZE
from evenpack.launcher.processes import stop
from evenpack.launcher.processes import supervise as module
from evenpack.launcher.processes.identities import RankPlace
from evenpack.launcher.processes.start import Devices, LaunchPlan
from evenpack.launcher.processes.supervise import LaunchResult, session_processes, supervise


@pytest.fixture
def looping(tmp_path: Path) -> Iterator[FakeRun]:
    run = FakeRun.create(tmp_path, "loop_alone")
    yield run
    assert run.close() == []


def plan(*command: str, environment: dict[str, str] | None = None) -> LaunchPlan:
    """Returns a run of one rank."""
    devices = Devices(kind="cpu", ranks=1, options=(), choice="one rank")
    return LaunchPlan(command=(sys.executable, *command), environment=environment or {}, devices=devices)


def supervise_with(run: FakeRun, meanwhile: Callable[[], None]) -> tuple[LaunchResult, list[str]]:
    """Runs one fake rank and calls `meanwhile` once it steps; returns the outcome and the messages."""

    def wait_and_act() -> None:
        run.wait_for("step")
        meanwhile()

    said: list[str] = []
    actor = threading.Thread(target=wait_and_act)
    actor.start()
    command = plan(str(HERE / "fake_worker.py"), str(run.run_file), environment=run.environment())
    result = supervise(command, run.output_dir, say=said.append)
    actor.join()
    return result, said


def send(*numbers: signal.Signals) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


def send_first(run: FakeRun, number: signal.Signals) -> None:
    """Sends a signal, and returns when a later one is another request."""
    send(number)
    wait_until((run.output_dir / ".stop").exists, "the answer to the first signal")
    time.sleep(1.0)


def test_what_a_launcher_has_left_in_a_shell_does_not_reach_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MACHINE, MAX_RESTARTS)
    for name in ("TORCHELASTIC_USE_AGENT_STORE", *(name for variable in variables for name in variable.names)):
        monkeypatch.setenv(name, "left")
    code = (
        "import os, pathlib; from evenpack.launcher.processes.local_launcher import environment_of; "
        "from evenpack.launcher.processes.identities import RankPlace; "
        "seen = os.environ | environment_of(1, 2, devices='0,1', port='29500'); "
        f"pathlib.Path({str(tmp_path / 'seen')!r}).write_text(f'{{RankPlace.of_environment(seen)}} '"
        " + ' '.join(name for name, value in seen.items() if value == 'left'))"
    )
    supervise(plan("-c", code), tmp_path / "out", say=lambda _: None)
    place = RankPlace(rank=1, world_size=2, local_rank=1, local_world_size=2, launched=True, first_of_machine=0)
    assert (tmp_path / "seen").read_text() == f"{place} "


def test_signals_close_together_are_one_request_to_stop(looping: FakeRun) -> None:
    result, said = supervise_with(looping, lambda: send(signal.SIGTERM, signal.SIGHUP, signal.SIGTERM))
    assert result.state == "stopped"
    assert said == ["saving at the end of this step; press again to stop immediately"]


def test_a_study_that_is_killed_while_its_runs_save_cuts_no_save_short(tmp_path: Path) -> None:
    """The study has passed on a signal; its end is no second one, and a second one still counts."""
    run = FakeRun.create(tmp_path, "hang_in_python")
    living = []

    def stop_study() -> None:
        send_first(run, signal.SIGTERM)
        stop._starter_has_ended.set()
        send(signal.SIGTERM)
        time.sleep(2.0)
        living.extend(run.living())
        send(signal.SIGTERM)

    result, said = supervise_with(run, stop_study)
    assert living != []
    assert (result.state, result.exit_code) == ("failed", 143)
    assert said[-1] == "stopping immediately"


def test_ranks_are_asked_directly_where_the_disk_takes_no_stop_file(
    looping: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_stop_request", fail)
    result, said = supervise_with(looping, lambda: send(signal.SIGTERM))
    assert result.state == "stopped"
    assert any("No space left on device" in one for one in said)


def test_handlers_are_as_before_when_a_run_has_ended(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    result = supervise(plan("-c", "raise SystemExit(3)"), tmp_path / "out", say=print)
    assert (result.state, result.exit_code) == ("failed", 1)
    assert "ended (exit code 3) before any rank had started" in result.message
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


def test_an_output_directory_that_is_removed_under_a_run_is_an_error_of_the_user(tmp_path: Path) -> None:
    script = "import shutil, sys; shutil.rmtree(sys.argv[1]); raise SystemExit(2)"
    result = supervise(plan("-c", script, str(tmp_path / "out")), tmp_path / "out", say=print)
    assert (result.state, result.exit_code) == ("failed", 2)
    assert f"{tmp_path / 'out'} was removed while the run was writing into it" in result.message


def test_what_a_launcher_leaves_behind_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STRAY_SECONDS", 0.5)
    script = (
        "import os, subprocess, sys\n"
        "open(sys.argv[1], 'w').write(str(os.getpid()))\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'], process_group=0)"
    )
    supervise(plan("-c", script, str(tmp_path / "session")), tmp_path / "out", say=print)
    assert session_processes(int((tmp_path / "session").read_text())) == []


def test_a_run_whose_supervision_breaks_is_ended(looping: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        if looping.pids_dir.exists() and any(looping.pids_dir.iterdir()):
            raise ZeroDivisionError

    monkeypatch.setattr(module._Supervisor, "_set_deadline", fail)
    command = plan(str(HERE / "fake_worker.py"), str(looping.run_file), environment=looping.environment())
    with pytest.raises(ZeroDivisionError):
        supervise(command, looping.output_dir, say=print)
    assert looping.living() == []
