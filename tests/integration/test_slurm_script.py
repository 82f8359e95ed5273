"""examples/train.sbatch starts `deepspeed` over fake ranks on two nodes, and saves before its time is up."""

import os
import signal
import stat
import sys
from pathlib import Path

import pytest
from fake_runs import HANGS_SECONDS, HERE, FakeRun, training, wait_until
from repository import ROOT

from evenpack.launcher.processes.start import WORKER_MODULE

SHIMS = {
    "scontrol": 'echo "$@" >> "$FAKE_PIDS/../scontrol"; [ "$1" != show ] || printf "127.0.0.1\\nlocalhost\\n"',
    "srun": """
while [[ "$1" == --* ]]; do shift; done
(SLURM_NODEID=1 "$@") &
SLURM_NODEID=0 "$@"
code=$?
wait
exit "$code"
""",
}
"""Two nodes, which are this machine."""


@pytest.mark.slow
@training("loop")
@pytest.mark.parametrize("when", ["before its ranks have started", "at a step"])
def test_a_job_whose_time_is_nearly_up_saves_and_is_queued_again(fake_run: FakeRun, tmp_path: Path, when: str) -> None:
    for name, text in SHIMS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(stat.S_IRWXU)
    script = (ROOT / "examples" / "train.sbatch").read_text()
    assert script.count(f" {WORKER_MODULE} ") == 1
    (tmp_path / "run.sbatch").write_text(script.replace(WORKER_MODULE, "fake_worker"))
    environment = fake_run.environment(
        PATH=os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]]),
        SLURM_JOB_ID=str(os.getpid()),
        SLURM_JOB_NODELIST="both",
        SLURM_GPUS_PER_NODE="1",
    )
    environment["PYTHONPATH"] = os.pathsep.join([environment["PYTHONPATH"], str(HERE.parents[1])])
    start = "import os, sys; os.execvp('bash', ['bash', *sys.argv[1:]])"
    bash = ["-c", start, str(tmp_path / "run.sbatch"), str(fake_run.run_file)]
    process = fake_run.start(bash, environment=environment, cwd=tmp_path)
    if when == "at a step":
        fake_run.wait_for("step")
    else:
        wait_until(lambda: "show hostnames both" in (tmp_path / "scontrol").read_text(), "the script to begin")
        assert not (fake_run.output_dir / "ranks").exists()
    process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=HANGS_SECONDS) == 75, fake_run.errors()
    assert [fake_run.status(rank)["state"] for rank in (0, 1)] == ["stopped", "stopped"]
    assert int(fake_run.wait_for("saved")) == fake_run.status(0)["step"]
    assert f"requeue {os.getpid()}" in (tmp_path / "scontrol").read_text()
    fake_run.wait_until_nothing_lives()
