"""Ranks without `deepspeed`, as children of the test: their messages, how they end, and what ends them."""

import os
import signal
import socket
import time
from dataclasses import replace

import psutil
import pytest
from fake_runs import HANGS_SECONDS, HERE, FakeRun, training, wait_until
from slow_cases import slow_but

from evenpack.engine.world.meeting import MEETING_SECONDS
from evenpack.errors import EXIT_BAD_INPUT, EXIT_STOPPED, RunError
from evenpack.launch_environment import free_port
from evenpack.launcher.processes.guard import EXIT_ENDED_BY_GUARD
from evenpack.launcher.processes.holding import held_output_dir
from evenpack.launcher.processes.identities import LaunchToken, RankPlace
from evenpack.launcher.processes.ranks import Failure, RankFolder, RankStatus, running_run
from evenpack.launcher.processes.stop import StopRequest, write_stop_request

Ranks = "list[subprocess.Popen[bytes]]"


def imports_torch(process: psutil.Process) -> bool:
    return any("libtorch" in one.path for one in process.memory_maps())


def exit_codes(ranks: Ranks) -> list[int]:
    return [rank.wait(timeout=HANGS_SECONDS) for rank in ranks]


@training("finish")
def test_a_rank_without_a_launcher_trains_alone(fake_run: FakeRun) -> None:
    rank = fake_run.start([str(HERE / "fake_worker.py"), str(fake_run.run_file), "training.steps=7"])
    assert exit_codes([rank]) == [0]
    status = fake_run.status(0)
    assert (status["state"], status["step"], status["exit_code"]) == ("finished", 7, 0)


@training("finish")
def test_a_rank_accepts_the_local_rank_that_deepspeed_adds(fake_run: FakeRun) -> None:
    rank = fake_run.start([str(HERE / "fake_worker.py"), "--local_rank=0", str(fake_run.run_file), "run.seed=3"])
    assert exit_codes([rank]) == [0]


@training("loop")
@pytest.mark.parametrize("number", slow_but([signal.SIGTERM], [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]))
def test_a_signal_to_one_rank_stops_all_after_saving(fake_run: FakeRun, number: signal.Signals) -> None:
    ranks = fake_run.start_ranks(2)
    fake_run.wait_for("step")
    ranks[1].send_signal(number)
    assert exit_codes(ranks) == [EXIT_STOPPED, EXIT_STOPPED]
    assert int(fake_run.wait_for("saved")) == fake_run.status(0)["step"] == fake_run.status(1)["step"]


@pytest.mark.slow
@training("loop")
def test_a_second_run_leaves_the_files_of_the_first_as_they_are(fake_run: FakeRun) -> None:
    first = fake_run.start_ranks(2, "training.steps=10000", meets=True)
    fake_run.wait_for("step")
    owners = [(one["run_id"], one["process"], one["state"]) for one in map(fake_run.status, (0, 1))]
    assert exit_codes(fake_run.start_ranks(2, meets=True)) == [EXIT_BAD_INPUT] * 2
    assert "error: another run is writing into" in fake_run.errors()
    assert "rank" not in fake_run.errors()
    assert [(one["run_id"], one["process"], one["state"]) for one in map(fake_run.status, (0, 1))] == owners
    assert not list((fake_run.output_dir / "ranks").glob("failure_*"))
    run_id = running_run(fake_run.output_dir)
    write_stop_request(fake_run.output_dir, StopRequest(run_id=run_id, at_once=False))
    assert exit_codes(first) == [EXIT_STOPPED] * 2


@training("loop")
@pytest.mark.slow
@pytest.mark.parametrize("machines", [1, 2])
def test_a_rank_that_cannot_read_its_run_file_ends_the_others_with_its_error(fake_run: FakeRun, machines: int) -> None:
    place = {"WORLD_SIZE": "2", "LOCAL_SIZE": str(2 // machines), "MASTER_ADDR": "127.0.0.1"}
    place["MASTER_PORT"] = str(free_port())
    files = [fake_run.run_file, fake_run.folder / "only_elsewhere.yaml"]
    started = time.monotonic()
    ranks = [
        fake_run.start(
            ["-m", "evenpack.launcher.worker", str(file)],
            environment=fake_run.environment(**place, RANK=str(rank), LOCAL_RANK=str(rank % (2 // machines))),
        )
        for rank, file in enumerate(files)
    ]
    assert exit_codes(ranks) == [EXIT_BAD_INPUT] * 2
    assert time.monotonic() - started < MEETING_SECONDS
    missing = f"run file {files[1]} does not exist"
    assert (f"rank 1: error: {missing}" in fake_run.errors()) == (machines == 2), (
        "a machine's first rank says it for all"
    )
    assert f"error: other ranks cannot start:\n  {socket.gethostname()}: {missing}" in fake_run.errors()


@training("loop")
def test_an_output_directory_that_cannot_be_used_is_one_message(fake_run: FakeRun) -> None:
    (fake_run.output_dir / "ranks").write_text("a file in the way")
    (rank,) = fake_run.start_ranks(1)
    assert exit_codes([rank]) == [EXIT_BAD_INPUT]
    (line,) = fake_run.errors().splitlines()
    assert line.startswith(f"error: {fake_run.output_dir / 'ranks'} cannot be made: File exists; move it away")


@training("loop")
def test_a_rank_that_waits_for_the_output_directory_has_not_started(fake_run: FakeRun) -> None:
    with held_output_dir(fake_run.output_dir):
        (rank,) = fake_run.start_ranks(1, "training.steps=4")
        lock = str(fake_run.output_dir / ".lock")
        files = psutil.Process(rank.pid).open_files
        wait_until(lambda: any(file.path == lock for file in files()), "the rank to wait for the lock")
        with pytest.raises(RunError, match="has not started yet"):
            running_run(fake_run.output_dir)
    assert exit_codes([rank]) == [0]


@pytest.mark.slow
@training("loop")
def test_ranks_that_wait_for_the_output_directory_hear_a_signal(fake_run: FakeRun) -> None:
    with held_output_dir(fake_run.output_dir):
        ranks = fake_run.start_ranks(2, meets=True)
        lock, files = str(fake_run.output_dir / ".lock"), psutil.Process(ranks[0].pid).open_files
        wait_until(lambda: any(file.path == lock for file in files()), "rank 0 to wait for the lock, and rank 1 for it")
        for rank in ranks:
            rank.send_signal(signal.SIGTERM)
        assert exit_codes(ranks) == [EXIT_STOPPED] * 2
    assert "stopped before the first step" in fake_run.errors()


@training("meet_in_vain")
def test_a_signal_to_one_rank_before_the_ranks_have_met_stops_them_all(fake_run: FakeRun) -> None:
    ranks = fake_run.start_ranks(2)
    for rank in (0, 1):
        fake_run.wait_for(f"waits_{rank}")
    ranks[0].send_signal(signal.SIGTERM)
    assert exit_codes(ranks) == [EXIT_STOPPED] * 2
    assert [fake_run.status(rank)["state"] for rank in (0, 1)] == ["stopped", "stopped"]
    assert "error" not in fake_run.errors()


@training("crash_while_others_meet")
def test_a_signal_that_follows_a_crash_before_the_ranks_have_met_is_no_stop(fake_run: FakeRun) -> None:
    """Launchers send it to the other ranks of a machine, and torchrun would not start ranks again that had stopped."""
    ranks = fake_run.start_ranks(3)
    assert exit_codes(ranks[2:]) == [1]
    ranks[1].send_signal(signal.SIGTERM)
    assert exit_codes(ranks) == [EXIT_ENDED_BY_GUARD, EXIT_ENDED_BY_GUARD, 1]
    assert not (fake_run.output_dir / ".stop").exists()
    assert "rank 1: ended because rank 2 on" in fake_run.errors()


@training("hang")
def test_a_second_sigterm_does_not_end_a_rank_because_deepspeed_sends_two(fake_run: FakeRun) -> None:
    (rank,) = fake_run.start_ranks(1)
    fake_run.wait_for("step")
    rank.send_signal(signal.SIGTERM)
    rank.send_signal(signal.SIGTERM)
    time.sleep(1.5)
    assert rank.poll() is None


@training("hang_in_python")
def test_a_second_ctrl_c_ends_a_rank_at_once(fake_run: FakeRun) -> None:
    (rank,) = fake_run.start_ranks(1)
    fake_run.wait_for("step")
    rank.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert rank.poll() is None
    while rank.poll() is None:  # on a busy machine it has perhaps not seen the first one yet
        rank.send_signal(signal.SIGINT)
        time.sleep(0.5)
    assert rank.returncode == 130


@training("refuse")
def test_an_error_of_all_ranks_is_printed_once_and_without_traceback(fake_run: FakeRun) -> None:
    assert exit_codes(fake_run.start_ranks(3)) == [EXIT_BAD_INPUT] * 3
    assert fake_run.errors() == "error: the checkpoint is of another run\n"


@training("save_while_rank_1_fails")
def test_a_rank_that_waits_for_its_save_gets_longer_than_others_after_a_failure(fake_run: FakeRun) -> None:
    assert exit_codes(fake_run.start_ranks(2)) == [2, 2]
    assert (fake_run.output_dir / "saved").exists()


@training("compute_while_a_thread_saves")
def test_a_rank_that_saves_in_the_background_gets_longer_too(fake_run: FakeRun) -> None:
    assert exit_codes(fake_run.start_ranks(2)) == [EXIT_ENDED_BY_GUARD, EXIT_BAD_INPUT]
    assert (fake_run.output_dir / "saved").exists()


@training("hang_in_python")
def test_a_failure_is_not_forgotten_when_another_start_removes_its_file(fake_run: FakeRun) -> None:
    (rank,) = fake_run.start_ranks(1)
    fake_run.wait_for("step")
    run_id = running_run(fake_run.output_dir)
    folder = RankFolder(fake_run.output_dir, run_id)
    elsewhere = replace(RankStatus.starting(run_id, RankPlace.of_environment({"RANK": "7"})), host="node9")
    folder.claim_failure(Failure.of(elsewhere.ended("failed", exit_code=1, error="its device is gone")))
    time.sleep(3.0)  # a guard looks twice a second
    next(folder.path.glob("failure_*")).unlink()
    assert exit_codes([rank]) == [EXIT_ENDED_BY_GUARD]
    assert "ended because rank 7 on node9 failed: its device is gone" in fake_run.errors()


@training("hang_in_python")
def test_ranks_of_an_earlier_run_end_when_another_one_begins(fake_run: FakeRun) -> None:
    """As on machines where a killed `evenpack train` has left them."""
    (rank,) = fake_run.start_ranks(1)
    fake_run.wait_for("step")
    later = RankStatus.starting("later", RankPlace.of_environment({}))
    RankFolder(fake_run.output_dir, "later").write_status(later)
    assert exit_codes([rank]) == [EXIT_ENDED_BY_GUARD]
    assert f"another run has begun in {fake_run.output_dir}" in fake_run.errors()
    assert RankFolder(fake_run.output_dir, "later").read_status(0) == later


@training("hang_in_python")
def test_a_rank_whose_launcher_was_killed_on_another_machine_makes_room_for_a_new_start(fake_run: FakeRun) -> None:
    """It cannot see that its launcher is gone, and holds the lock of whoever writes the run's files."""
    here = LaunchToken.of_this_process()
    (old,) = fake_run.start_ranks(1, f"--evenpack-run={replace(here, host='login', machine='other', run_id='old')}")
    fake_run.wait_for("step")
    (new,) = fake_run.start_ranks(1, f"--evenpack-run={here}")
    assert exit_codes([old]) == [EXIT_ENDED_BY_GUARD]
    assert f"another run has begun in {fake_run.output_dir}" in fake_run.errors()
    wait_until(lambda: str(new.pid) in (fake_run.output_dir / ".writer").read_text(), "the new run to write")
    assert new.poll() is None


@training("fill_the_disk")
def test_an_error_of_the_system_that_nobody_has_explained_is_one_line(fake_run: FakeRun) -> None:
    assert exit_codes(fake_run.start_ranks(2)) == [EXIT_BAD_INPUT, 1]
    said = fake_run.errors()
    place = f"{fake_run.output_dir} cannot be written on {socket.gethostname()} while recording the step"
    assert f"rank 0: error: {place}: No space left on device; make room on its disk, and run the same command" in said
    assert f"after rank 0 on {socket.gethostname()} failed: {place}" in said
    assert "Traceback" not in said


@training("refuse_on_rank_1")
def test_an_error_of_one_rank_is_printed_with_its_number_and_ends_the_others(fake_run: FakeRun) -> None:
    assert exit_codes(fake_run.start_ranks(2)) == [EXIT_ENDED_BY_GUARD, EXIT_BAD_INPUT]
    assert "rank 1: error: the checkpoint is truncated here" in fake_run.errors()
    assert "rank 0: ended because rank 1 on" in fake_run.errors()
    assert "Traceback" not in fake_run.errors()


@training("crash_on_rank_1")
def test_the_traceback_is_that_of_the_rank_that_failed_first(fake_run: FakeRun) -> None:
    codes = exit_codes(fake_run.start_ranks(2))
    assert codes[1] == 1
    assert codes[0] in (1, EXIT_ENDED_BY_GUARD)
    assert fake_run.errors().count("Traceback") == 1
    assert f"rank 1 on {socket.gethostname()} failed:\nTraceback" in fake_run.errors()
    assert fake_run.failure()["error"] == "ZeroDivisionError: one by zero"


@training("loop")
def test_a_rank_whose_peer_is_killed_names_it_instead_of_its_own_broken_connection(fake_run: FakeRun) -> None:
    ranks = fake_run.start_ranks(2)
    fake_run.wait_for("step")
    ranks[1].kill()
    ranks[1].wait()
    assert exit_codes(ranks[:1]) == [1]
    assert "Traceback" not in fake_run.errors()
    assert "after rank 1 on" in fake_run.errors()
    assert fake_run.failure()["rank"] == 1
    assert fake_run.failure()["error"] is None


@training("loop")
@pytest.mark.parametrize("machines", slow_but([2], [1, 2, 4]))
def test_a_rank_whose_peer_on_another_machine_is_killed_names_it(fake_run: FakeRun, machines: int) -> None:
    """Rank 0 loses its connection, and so do ranks 1 and 3 afterwards; nobody but rank 3's machine can see rank 2."""
    ranks = fake_run.start_ranks(4, machines=machines)
    fake_run.wait_for("step")
    ranks[2].kill()
    ranks[2].wait()
    assert all(code != 0 for code in exit_codes(ranks))
    assert "Traceback" not in fake_run.errors()
    failure = fake_run.failure()
    assert failure["rank"] == 2
    if machines < 4:
        assert failure["error"] is None
    else:
        assert "others have lost their connection to it; it does not answer" in failure["error"]
        assert "after rank 2 on" in fake_run.errors()


@training("break_connection_on_rank_1")
def test_a_lost_connection_is_blamed_on_its_reporter_if_all_others_answer(fake_run: FakeRun) -> None:
    ranks = fake_run.start_ranks(2, machines=2)
    assert all(code != 0 for code in exit_codes(ranks))
    assert fake_run.failure()["rank"] == 1
    assert "the network is down" in fake_run.failure()["error"]


@training("hang")
def test_a_rank_that_dies_before_it_has_said_anything_is_missed(fake_run: FakeRun) -> None:
    token = f"--evenpack-run={LaunchToken.of_this_process()}"
    script = (
        "import subprocess, sys, os\n"
        "run = lambda rank, *command: subprocess.Popen([sys.executable, *command], "
        "env={**os.environ, 'RANK': rank, 'LOCAL_RANK': rank, 'WORLD_SIZE': '2', 'LOCAL_SIZE': '2'})\n"
        "silent = run('1', '-c', 'raise SystemExit(1)')\n"
        f"speaking = run('0', {str(HERE / 'fake_worker.py')!r}, {str(fake_run.run_file)!r}, {token!r})\n"
        "silent.wait()\n"
        "sys.exit(speaking.wait())"
    )
    launcher = fake_run.start(["-c", script])
    assert exit_codes([launcher]) == [EXIT_ENDED_BY_GUARD]
    assert "rank 1 on" in fake_run.errors()
    assert "exited without an error message" in fake_run.errors()


@training("hang")
def test_ranks_end_when_their_launcher_is_killed(fake_run: FakeRun) -> None:
    script = (
        "import subprocess, sys, os, time\n"
        f"subprocess.Popen([sys.executable, {str(HERE / 'fake_worker.py')!r}, {str(fake_run.run_file)!r}], "
        "env={**os.environ, 'RANK': '0', 'LOCAL_RANK': '0', 'WORLD_SIZE': '1', 'LOCAL_SIZE': '1'})\n"
        "time.sleep(1000)"
    )
    launcher = fake_run.start(["-c", script])
    fake_run.wait_for("step")
    launcher.kill()
    launcher.wait()
    fake_run.wait_until_nothing_lives()
    assert "the launcher (process" in fake_run.status(0)["error"]


@training("hang")
def test_a_rank_that_waits_for_another_machine_ends_when_its_launcher_is_killed(fake_run: FakeRun) -> None:
    """Else it would train alone with the others, once they come, and no process would wait for it."""
    place = {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    script = (
        "import subprocess, sys, os, time\n"
        f"subprocess.Popen([sys.executable, {str(HERE / 'fake_worker.py')!r}, {str(fake_run.run_file)!r}], "
        f"env={{**os.environ, **{place | {'MASTER_PORT': str(free_port())}!r}}})\n"
        "time.sleep(1000)"
    )
    launcher = fake_run.start(["-c", script])
    wait_until(lambda: any(imports_torch(rank) for rank in fake_run.living()), "a rank that is about to meet")
    launcher.kill()
    launcher.wait()
    fake_run.wait_until_nothing_lives()
    assert f"the launcher (process {launcher.pid}) has ended" in fake_run.errors()
    assert "Traceback" not in fake_run.errors()


@training("hang")
def test_a_rank_without_a_launcher_outlives_the_shell_that_has_started_it(fake_run: FakeRun) -> None:
    script = "import subprocess, sys, time; subprocess.Popen([sys.executable, *sys.argv[1:]]); time.sleep(1000)"
    shell = fake_run.start(["-c", script, str(HERE / "fake_worker.py"), str(fake_run.run_file)])
    fake_run.wait_for("step")
    shell.kill()
    shell.wait()
    time.sleep(1.5)
    (rank,) = fake_run.living()
    os.kill(rank.pid, signal.SIGKILL)
    wait_until(lambda: not fake_run.living(), "the end of the rank")


@pytest.mark.slow
@training("finish")
def test_a_run_file_with_a_wrong_key_is_refused_by_the_first_rank_of_each_machine(fake_run: FakeRun) -> None:
    fake_run.run_file.write_text(fake_run.run_file.read_text() + "optimiser: {}\n")
    assert exit_codes(fake_run.start_ranks(2, meets=True)) == [EXIT_BAD_INPUT] * 2
    assert fake_run.errors().count("did you mean 'optimizer'") == 1


@pytest.mark.slow
@training("hang")
def test_ranks_with_different_output_directories_are_named_with_them(fake_run: FakeRun) -> None:
    elsewhere = fake_run.folder / "elsewhere"
    given = {1: [str(fake_run.run_file), f"run.output_dir={elsewhere}"]}
    ranks = fake_run.start_ranks(2, given=given, meets=True)
    assert exit_codes(ranks[1:]) == [EXIT_BAD_INPUT]
    assert f"error: run.output_dir is {fake_run.output_dir} for rank 0 and {elsewhere} for rank 1: give all ranks" in (
        fake_run.errors()
    )


@training("finish")
def test_an_output_directory_that_cannot_be_made_is_an_error_of_the_user(fake_run: FakeRun) -> None:
    rank = fake_run.start([str(HERE / "fake_worker.py"), str(fake_run.run_file), "run.output_dir=/dev/null/out"])
    assert exit_codes([rank]) == [EXIT_BAD_INPUT]
    assert "/dev/null/out cannot be written" in fake_run.errors()
    assert "Traceback" not in fake_run.errors()


@pytest.mark.slow
@training("finish")
def test_torchrun_starts_ranks_too(fake_run: FakeRun) -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(HERE / "fake_worker.py")]
    agent = fake_run.start([*command, str(fake_run.run_file)])
    assert exit_codes([agent]) == [0]
    assert [fake_run.status(rank)["state"] for rank in (0, 1)] == ["finished", "finished"]


@pytest.mark.slow
@training("crash_in_first_life")
def test_torchrun_starts_ranks_again_that_have_failed(fake_run: FakeRun) -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    process = fake_run.start([*command, str(HERE / "fake_worker.py"), str(fake_run.run_file)])
    assert exit_codes([process]) == [0]
    assert [fake_run.status(rank)["state"] for rank in (0, 1)] == ["finished", "finished"]


@training("loop_alone")
@pytest.mark.parametrize(("restarts", "code"), [("0", EXIT_STOPPED), ("3", 0)])
def test_a_stop_is_no_failure_to_a_torchrun_that_would_start_the_rank_again(
    fake_run: FakeRun, restarts: str, code: int
) -> None:
    environment = fake_run.environment(TORCHELASTIC_MAX_RESTARTS=restarts)
    rank = fake_run.start([str(HERE / "fake_worker.py"), str(fake_run.run_file)], environment=environment)
    fake_run.wait_for("step")
    rank.send_signal(signal.SIGTERM)
    assert exit_codes([rank]) == [code]
    assert fake_run.status(0)["state"] == "stopped"


@pytest.mark.slow
@training("loop_alone")
def test_torchrun_does_not_start_ranks_again_that_were_asked_to_stop(fake_run: FakeRun) -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "--max-restarts", "3"]
    process = fake_run.start([*command, str(HERE / "fake_worker.py"), str(fake_run.run_file)])
    fake_run.wait_for("step")
    run_id = running_run(fake_run.output_dir)
    write_stop_request(fake_run.output_dir, StopRequest(run_id=run_id, at_once=False))
    assert exit_codes([process]) == [0]
    assert (fake_run.status(0)["run_id"], fake_run.status(0)["state"]) == (run_id, "stopped")
