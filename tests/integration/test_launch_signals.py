"""Runs with real launchers and fake training end correctly and leave no processes, however they end."""

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from fake_runs import HANGS_SECONDS, HERE, FakeRun, training, wait_until

from evenpack.errors import EXIT_BAD_INPUT, EXIT_STOPPED, RunError
from evenpack.launcher.processes.holding import held_output_dir
from evenpack.launcher.processes.ranks import running_run
from evenpack.launcher.processes.start import LOCAL_LAUNCHER
from evenpack.launcher.processes.stop import StopRequest, write_stop_request


def end(process: "subprocess.Popen[bytes]") -> int:
    """Returns the exit code of a process."""
    return process.wait(timeout=HANGS_SECONDS)


def find_process(run: FakeRun, *words: str) -> psutil.Process:
    """Returns the process of the run whose command line holds all words."""
    return next(p for p in run.living() if all(any(word in part for part in p.cmdline()) for word in words))


@training("loop")
def test_ctrl_c_saves_after_the_step_and_exits_with_the_code_of_a_stopped_run(fake_run: FakeRun) -> None:
    write_stop_request(fake_run.output_dir, StopRequest(run_id="of an earlier run", at_once=True))
    process = fake_run.launch()
    fake_run.wait_for("step")
    with pytest.raises(RunError, match="another run"), held_output_dir(fake_run.output_dir, patience_seconds=0.0):
        pass
    assert os.getsid(fake_run.pid(0)) != os.getsid(process.pid), "a terminal's Ctrl-C would reach the ranks"
    process.send_signal(signal.SIGINT)
    assert end(process) == EXIT_STOPPED
    saved = int(fake_run.wait_for("saved"))
    assert fake_run.result()["state"] == "stopped"
    assert [fake_run.status(rank)["state"] for rank in (0, 1)] == ["stopped", "stopped"]
    assert [fake_run.status(rank)["step"] for rank in (0, 1)] == [saved, saved]
    assert "press again to stop immediately" in fake_run.errors()
    assert fake_run.living() == []
    assert not (fake_run.output_dir / ".stop").exists()


@training("meet_in_vain")
def test_a_run_that_stops_before_its_first_step_has_the_code_of_a_stopped_run(fake_run: FakeRun) -> None:
    process = fake_run.launch()
    fake_run.wait_for("waits_1")
    process.send_signal(signal.SIGTERM)
    assert end(process) == EXIT_STOPPED
    assert "stopped before the first step" in fake_run.result()["message"]


@training("hang_holding_everything")
def test_a_second_ctrl_c_kills_ranks_in_which_nothing_runs_any_more(fake_run: FakeRun) -> None:
    process = fake_run.launch()
    fake_run.wait_for("step")
    process.send_signal(signal.SIGINT)
    wait_until(lambda: "press again" in fake_run.errors(), "the answer to Ctrl-C")
    time.sleep(1.0)  # or both would be one request
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert end(process) == 130
    assert fake_run.living() == []


@training("loop_with_helper")
def test_ranks_and_what_they_have_started_end_when_evenpack_train_is_killed(fake_run: FakeRun) -> None:
    process = fake_run.launch()
    fake_run.wait_for("step")
    assert psutil.pid_exists(int(fake_run.wait_for("helper_1")))
    process.kill()
    process.wait()
    fake_run.wait_until_nothing_lives()
    assert not (fake_run.output_dir / "saved").exists()
    assert "`evenpack train` (process" in fake_run.failure()["error"]


@training("die_on_rank_1")
def test_a_killed_rank_ends_the_run_and_is_named_though_the_others_wait_for_ever(fake_run: FakeRun) -> None:
    process = fake_run.launch()
    assert end(process) == 1
    assert "rank 1 on" in fake_run.result()["message"]
    assert "exited without an error message (killed by SIGKILL" in fake_run.result()["message"]
    assert fake_run.living() == []


@pytest.fixture
def other_checkout(tmp_path: Path) -> Path:
    """A folder with a package of evenpack's name, which ranks that are started there must not import."""
    folder = tmp_path / "checkout"
    (folder / "evenpack").mkdir(parents=True)
    (folder / "evenpack/__init__.py").write_text("raise SystemExit('this is another evenpack')")
    return folder


@pytest.mark.slow
@training("loop")
def test_ranks_save_and_stop_when_only_the_deepspeed_command_is_terminated(
    fake_run: FakeRun, other_checkout: Path
) -> None:
    hostfile = fake_run.folder / "hosts"
    hostfile.write_text("localhost slots=2\n")
    process = fake_run.launch(hostfile=str(hostfile), cwd=other_checkout)
    fake_run.wait_for("step")
    find_process(fake_run, "deepspeed.launcher.runner", "--module").terminate()
    assert end(process) == EXIT_STOPPED
    assert int(fake_run.wait_for("saved")) == fake_run.status(1)["step"]


@training("loop")
def test_ranks_save_and_stop_when_only_their_launcher_is_terminated(fake_run: FakeRun, other_checkout: Path) -> None:
    process = fake_run.launch(cwd=other_checkout)
    fake_run.wait_for("step")
    find_process(fake_run, LOCAL_LAUNCHER).terminate()
    assert end(process) == EXIT_STOPPED
    assert int(fake_run.wait_for("saved")) == fake_run.status(1)["step"]


@pytest.mark.slow
@training("loop")
def test_ranks_end_when_the_process_that_has_started_them_is_killed(fake_run: FakeRun) -> None:
    process = fake_run.launch()
    fake_run.wait_for("step")
    find_process(fake_run, LOCAL_LAUNCHER).kill()
    assert end(process) == 1
    assert "the launcher (process" in fake_run.result()["message"]


@pytest.mark.slow
@training("loop")
def test_a_lost_terminal_stops_the_run_in_order(fake_run: FakeRun) -> None:
    here, there = pty.openpty()
    process = fake_run.launch(stdin=there, stdout=there, stderr=there)
    os.close(there)
    fake_run.wait_for("step")
    process.send_signal(signal.SIGHUP)
    os.close(here)
    assert end(process) == EXIT_STOPPED
    assert int(fake_run.wait_for("saved")) == fake_run.status(0)["step"]


@training("loop")
def test_a_ctrl_c_that_ends_the_reader_of_the_output_too_stops_the_run_in_order(fake_run: FakeRun) -> None:
    """As with `evenpack train RUN.yaml 2>&1 | tee log`."""
    here, there = os.pipe()
    process = fake_run.launch(stdout=there, stderr=there)
    os.close(there)
    fake_run.wait_for("step")
    os.close(here)
    process.send_signal(signal.SIGINT)
    assert end(process) == EXIT_STOPPED
    assert int(fake_run.wait_for("saved")) == fake_run.status(0)["step"]


@pytest.mark.slow
@training("loop_alone")
def test_a_run_goes_on_when_the_shell_has_ended_that_started_its_launcher(fake_run: FakeRun) -> None:
    shell = "import subprocess, sys; subprocess.Popen(sys.argv[1:]); sys.stdin.read()"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    command = ["-c", shell, *torchrun, str(HERE / "fake_worker.py"), str(fake_run.run_file)]
    process = fake_run.start(command, stdin=subprocess.PIPE)
    fake_run.wait_for("step")
    process.communicate()
    time.sleep(3.0)  # a guard looks twice a second
    assert fake_run.status(0)["state"] == "running"
    write_stop_request(fake_run.output_dir, StopRequest(run_id=running_run(fake_run.output_dir), at_once=False))
    fake_run.wait_until_nothing_lives()
    assert fake_run.status(0)["state"] == "stopped"


@pytest.mark.slow
@training("loop")
def test_plain_deepspeed_stops_in_order_and_leaves_no_orphan_when_terminated(fake_run: FakeRun) -> None:
    command = ["-m", "deepspeed.launcher.runner", "--num_gpus=2", "--module", "fake_worker", str(fake_run.run_file)]
    process = fake_run.start(command)
    fake_run.wait_for("step")
    process.terminate()
    process.wait()
    fake_run.wait_until_nothing_lives()
    assert int(fake_run.wait_for("saved")) == fake_run.status(1)["step"]
    assert "saving at the end of this step" in fake_run.errors()


@training("fill_the_disk")
def test_a_run_on_a_full_disk_ends_with_2_and_the_cause_last(fake_run: FakeRun) -> None:
    """Rank 1, which lost its connection to rank 0, is not to blame, though nobody could record the first failure."""
    assert fake_run.launch().wait() == EXIT_BAD_INPUT
    assert fake_run.result()["exit_code"] == EXIT_BAD_INPUT
    last = fake_run.result()["message"].splitlines()[-1]
    assert last.startswith("rank 0 on ")
    assert f"{fake_run.output_dir} cannot be written on " in last
    assert ": No space left on device; make room on its disk" in last
    assert "Traceback" not in fake_run.errors()
