"""What a run promises under `deepspeed`, `torchrun` and `mpirun`, without `evenpack train`: see tests/README.md."""

import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest
from fake_runs import HERE, FakeRun, training
from faults.life import Life
from faults.running import Injected, kill_a_launcher, kill_a_loader, kill_a_rank
from faults.subject import Case, Stack, Subject
from run_files import prepared, run_config, write_run_file
from small_run import small_run_values

from evenpack.errors import EXIT_STOPPED
from evenpack.launch_environment import free_port
from evenpack.launcher.processes.ranks import read_json_object

pytestmark = pytest.mark.slow

END_SECONDS = 60.0
"""Seconds from a fault to the end of every process."""
START_SECONDS = 600.0
"""Only a start that fails takes so long, on a busy machine too."""
AT_ONCE_SECONDS = 20.0
"""Less than a starter waits for ranks that it has asked to end."""

STARTERS = ("deepspeed", "torchrun", "mpirun")
BIN = Path(sys.executable).parent


def start(
    run: FakeRun, starter: str, *overrides: str, worker: str = "fake_worker", run_file: Path | None = None
) -> Any:
    """Starts two ranks."""
    module, arguments = worker, [str(run_file or run.run_file), *overrides]
    worker_command = [str(HERE / f"{module}.py"), *arguments]
    if starter == "deepspeed":
        options = ["--num_gpus=2", f"--master_port={free_port()}"]
        return run.start(["-m", "deepspeed.launcher.runner", *options, "--module", module, *arguments])
    if starter.startswith("torchrun"):
        restarts = starter.partition(" --max-restarts ")[2] or "0"
        options = ["--standalone", "--nproc-per-node=2", f"--max-restarts={restarts}"]
        return run.start(["-m", "torch.distributed.run", *options, *worker_command])
    exec_it = "import os, sys; os.execv(sys.argv[1], sys.argv[1:])"
    mpirun = [str(BIN / "mpirun"), "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return run.start(["-c", exec_it, *mpirun, *worker_command], environment=run.environment(**place))


def wait(run: FakeRun, condition: Callable[[], bool], *, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{run.living()}\n{run.errors()}"
        time.sleep(0.1)


def wait_for_steps(run: FakeRun) -> None:
    wait(run, (run.output_dir / "step").exists, seconds=START_SECONDS)


def end(run: FakeRun, process: Any) -> int:
    """Returns the exit code of the starter; nothing of the run lives `END_SECONDS` later."""
    wait(run, lambda: process.poll() is not None and not run.living(), seconds=END_SECONDS)
    return int(process.returncode)


@pytest.mark.parametrize("starter", STARTERS)
@training("crash_on_rank_1")
def test_a_rank_that_fails_ends_all_and_is_named_with_host_and_error(fake_run: FakeRun, starter: str) -> None:
    process = start(fake_run, starter)
    wait(fake_run, lambda: process.poll() is not None, seconds=START_SECONDS + END_SECONDS)
    assert end(fake_run, process) != 0
    error = "ZeroDivisionError: one by zero"
    _, _, last = fake_run.errors().partition(f"rank 1 on {socket.gethostname()} failed:\nTraceback")
    assert f"\n{error}\n" in last
    assert "rank 0 failed" not in fake_run.errors()
    assert (fake_run.failure()["rank"], fake_run.failure()["error"]) == (1, error)


@pytest.mark.parametrize(
    ("starter", "code"),
    [("deepspeed", EXIT_STOPPED), ("torchrun", 1), ("torchrun --max-restarts 1", 0), ("mpirun", EXIT_STOPPED)],
)
@training("loop")
def test_a_sigterm_to_a_rank_saves_once_and_ends_all(fake_run: FakeRun, starter: str, code: int) -> None:
    process = start(fake_run, starter)
    wait_for_steps(fake_run)
    fake_run.signal(1, signal.SIGTERM)
    assert end(fake_run, process) == code
    saved = int((fake_run.output_dir / "saved").read_text())
    statuses = [fake_run.status(rank) for rank in (0, 1)]
    rank_code = 0 if code == 0 else EXIT_STOPPED
    assert [(one["state"], one["step"], one["exit_code"]) for one in statuses] == [("stopped", saved, rank_code)] * 2


@training("loop")
def test_a_sigterm_to_torchrun_saves(fake_run: FakeRun) -> None:
    process = start(fake_run, "torchrun")
    wait_for_steps(fake_run)
    process.send_signal(signal.SIGTERM)
    assert end(fake_run, process) != 0
    assert int((fake_run.output_dir / "saved").read_text()) == fake_run.status(1)["step"]


@pytest.mark.parametrize("starter", ["torchrun", "mpirun"])  # `deepspeed` waits 30 s: see tests/README.md
@training("hang_in_python")
def test_a_second_ctrl_c_ends_all_at_once(fake_run: FakeRun, starter: str) -> None:
    process = start(fake_run, starter)
    wait_for_steps(fake_run)
    os.killpg(process.pid, signal.SIGINT)
    seen = "asked to stop"  # a busy rank may take a while to see it
    wait(fake_run, lambda: process.poll() is not None or seen in fake_run.errors(), seconds=END_SECONDS)
    time.sleep(1.0)  # or both would be one request
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
    began = time.monotonic()
    assert end(fake_run, process) != 0
    assert time.monotonic() - began < AT_ONCE_SECONDS


@pytest.mark.parametrize("starter", STARTERS)
@training("loop")
def test_a_stopped_rank_is_named_by_step_and_activity(fake_run: FakeRun, starter: str) -> None:
    process = start(fake_run, starter, "run.hang_timeout_seconds=10", "run.start_timeout_seconds=20")
    file = fake_run.output_dir / "ranks" / "rank_1.json"
    wait(fake_run, lambda: (read_json_object(file) or {"place": [0]})["place"][0] > 0, seconds=START_SECONDS)
    fake_run.signal(1, signal.SIGSTOP)
    assert end(fake_run, process) != 0
    failure = fake_run.failure()
    assert failure["rank"] == 1
    assert re.search(
        r"no progress for .* \(step \d+, (computing gradients|summing over the ranks); it does not answer",
        failure["error"],
    )


@pytest.mark.parametrize("starter", STARTERS)
@pytest.mark.parametrize("victim", ["starter", "rank"])
@training("loop")
def test_a_kill_leaves_no_process(fake_run: FakeRun, starter: str, victim: str) -> None:
    process = start(fake_run, starter)
    wait_for_steps(fake_run)
    if victim == "starter":
        process.kill()
    else:
        fake_run.signal(1, signal.SIGKILL)
    assert end(fake_run, process) != 0


@pytest.mark.parametrize("starter", STARTERS)
@training("loop_with_helper")
def test_a_kill_of_a_rank_ends_what_it_has_started(fake_run: FakeRun, starter: str) -> None:
    """Also a program that does not watch its parent."""
    process = start(fake_run, starter)
    wait_for_steps(fake_run)
    assert psutil.pid_exists(int(fake_run.wait_for("helper_1")))
    fake_run.signal(1, signal.SIGKILL)
    assert end(fake_run, process) != 0


@pytest.fixture(scope="module")
def real_run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("real")
    prepared(run_config(values := small_run_values(folder)))
    return write_run_file(folder / "run.yaml", values)


@pytest.mark.parametrize("starter", STARTERS)
@training("loop")
def test_ranks_that_disagree_are_refused_with_what_differs(
    fake_run: FakeRun, starter: str, real_run_file: Path
) -> None:
    process = start(
        fake_run, starter, f"run.output_dir={fake_run.output_dir}", run_file=real_run_file, worker="other_rank"
    )
    wait(fake_run, lambda: process.poll() is not None, seconds=START_SECONDS)
    assert end(fake_run, process) != 0
    said = " ".join(fake_run.errors().split())
    host = socket.gethostname()
    assert f"run.seed: 5 on rank 0 ({host}); 6 on rank 1 ({host})" in said
    assert re.search(rf"deepspeed: \S+ on rank 0 \({host}\); 0\.0\.0 on rank 1 \({host}\)", said)
    assert not (fake_run.output_dir / "metrics.jsonl").exists()


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return Subject(tmp_path_factory.mktemp("subject") / "runs")


@pytest.mark.parametrize(
    ("stack", "kill"), [("deepspeed", kill_a_loader), ("torchrun", kill_a_launcher), ("mpirun", kill_a_rank)]
)
def test_a_kill_of_a_real_run_leaves_no_process_port_or_shared_memory(
    subject: Subject, stack: Stack, kill: Callable[[Life, Random], Injected]
) -> None:
    run = subject.new_run(stack, Case(stack=stack, ranks=2, zero_stage=0))
    life = Life(run, run.command(), run.folder / "log")
    try:
        assert life.wait_for(lambda: life.step() > 0, seconds=START_SECONDS), life.said()
        life.mark()
        kill(life, Random(0))
        ended = life.wait_for_end(seconds=END_SECONDS)
        assert ended is not None, life.said()
        assert ended.orphans == ()
        assert ended.exit_code != 0, ended.said
        assert life.left_behind() == []
    finally:
        life.kill()
