"""Real runs over two machines: the order is that of one machine, and who dies is named with the machine.

Each launcher trains once to its end, and once until a rank is killed. See `two_machines` for what a machine is here.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from forked_ranks import run_ranks
from run_files import changed, prepared, run_config, write_run_file
from small_run import HANGS_SECONDS, metrics, small_run_values, steps, train_on
from two_machines import NETWORK, PATH, Machine, TwoMachines, missing_tool, two_machines

pytestmark = pytest.mark.slow

STEPS = 120
LONG = "training.steps=1500"
"""More steps than are done before a rank is killed."""

WORKER = ("-m", "evenpack.launcher.worker")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Two machines, and a prepared run."""

    machines: TwoMachines
    run_file: Path

    def evenpack_train(
        self, output_dir: Path, *overrides: str, slots: int, options: str = "", on: Sequence[Machine] = ()
    ) -> "Started":
        """Starts `evenpack train` on node1, for both machines or those of `on`."""
        hostfile = self.machines.hostfile(slots, *on)
        arguments = [str(self.run_file), f"run.output_dir={output_dir}", *overrides, "--hostfile", str(hostfile)]
        command = ["-m", "evenpack.launcher.cli", "train", *arguments]
        command += ["--deepspeed-options", options]
        return self.start(output_dir, {self.machines.node1: command})

    def torchrun(
        self, output_dir: Path, *, rendezvous: str = "static", restarts: int = 0, of_node2: Sequence[str] = ()
    ) -> "Started":
        """Starts `torchrun` on each machine, with one rank."""
        address = self.machines.node1.address
        ways = {
            "static": [f"--master-addr={address}", "--master-port=29511"],
            "c10d": ["--rdzv-backend=c10d", f"--rdzv-endpoint={address}:29512", "--rdzv-id=7"],
        }
        torchrun = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", f"--max-restarts={restarts}"]
        run = [*WORKER, str(self.run_file), f"run.output_dir={output_dir}"]
        one = [*torchrun, *ways[rendezvous], "--node-rank=0", *run]
        two = [*torchrun, *ways[rendezvous], "--node-rank=1", *run, *of_node2]
        return self.start(output_dir, {self.machines.node1: one, self.machines.node2: two})

    def start(self, output_dir: Path, commands: "Mapping[Machine, Sequence[str]]") -> "Started":
        """Starts a Python program on each machine, in the output directory."""
        output_dir.mkdir()
        (output_dir / ".deepspeed_env").write_text("DS_ACCELERATOR=cpu\nOMP_NUM_THREADS=1\n")
        environment = {
            **os.environ,
            "PATH": PATH,
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "PDSH_SSH_ARGS_APPEND": self.machines.ssh_options,
        }
        processes = []
        with (output_dir / "log").open("w") as log:
            for machine, command in commands.items():
                line = machine.command(sys.executable, *command)
                processes.append(subprocess.Popen(line, env=environment, cwd=output_dir, stdout=log, stderr=log))
        return Started(cluster=self, output_dir=output_dir, processes=tuple(processes))


@dataclass(frozen=True, kw_only=True)
class Started:
    """A run that goes on."""

    cluster: Cluster
    output_dir: Path
    processes: "tuple[subprocess.Popen[bytes], ...]"

    @property
    def log(self) -> str:
        return (self.output_dir / "log").read_text()

    def end(self) -> list[int]:
        """Waits for the end, and returns the exit codes; nothing is left on either machine then."""
        codes = [process.wait(timeout=HANGS_SECONDS) for process in self.processes]
        deadline = time.monotonic() + 30.0
        while self.cluster.machines.processes() and time.monotonic() < deadline:
            time.sleep(0.2)
        left = [psutil.Process(pid).cmdline() for pid in self.cluster.machines.processes()]
        assert left == [], self.log
        return codes

    def wait_for_a_checkpoint(self) -> None:
        deadline = time.monotonic() + HANGS_SECONDS
        while not (self.output_dir / "checkpoints" / "latest").exists():
            assert all(process.poll() is None for process in self.processes), self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.1)

    def kill_last_rank(self) -> None:
        """Kills the last rank of node2 by SIGKILL."""
        statuses = (self.output_dir / "ranks").glob("rank_*.json")
        last = max((json.loads(path.read_text()) for path in statuses), key=lambda status: status["rank"])
        assert last["host"] == "node2"
        os.kill(last["process"]["pid"], signal.SIGKILL)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("machines")
    reason = missing_tool("pdsh")
    if reason is not None:
        pytest.skip(reason)
    values = small_run_values(folder)
    values["model"]["dropout"] = 0.0
    values["training"] |= {"steps": STEPS, "evaluate_every_steps": 60, "checkpoint_every_steps": 20}
    prepared(run_config(values))
    with two_machines(folder / "ssh") as machines:
        yield Cluster(machines=machines, run_file=write_run_file(folder / "run.yaml", values))


@pytest.fixture(autouse=True)
def nothing_is_left(cluster: Cluster) -> Iterator[None]:
    """Kills what a failed test has left, so that it is the only one to fail."""
    yield
    for pid in cluster.machines.processes():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def on_one_machine(cluster: Cluster) -> Path:
    """The output of the run on two ranks of one machine."""
    from evenpack.config import load_run_file
    from evenpack.engine.config import RunConfig

    output_dir = cluster.run_file.parent / "on_one_machine"
    config = changed(load_run_file(cluster.run_file, RunConfig), run={"output_dir": output_dir})
    run_ranks(train_on, 2, config)
    return output_dir


def assert_same_order(output_dir: Path, other: Path) -> None:
    assert len(metrics(output_dir)) == STEPS
    assert steps(output_dir, "step", "order_hash") == steps(other, "step", "order_hash")
    for (here,), (there,) in zip(steps(output_dir, "loss"), steps(other, "loss"), strict=True):
        assert here == pytest.approx(there, rel=1e-5)


def options_of(launcher: str, cluster: Cluster) -> str:
    """Returns the options of `deepspeed`; Open MPI from its wheel finds its daemon by --prefix."""
    if launcher == "pdsh":
        return ""
    reason = missing_tool("mpirun")
    if reason is not None:
        pytest.skip(reason)
    arguments = [
        f"--allow-run-as-root --prefix {sys.prefix} --mca btl_tcp_if_include {NETWORK}",
        f'--prtemca plm_ssh_args "{cluster.machines.ssh_options}"',
    ]
    common = f"--no_ssh_check --master_addr {cluster.machines.node1.address}"
    return f"{common} --launcher openmpi --launcher_args '{' '.join(arguments)}'"


@pytest.mark.parametrize("launcher", ["pdsh", "openmpi"])
def test_a_hostfile_gives_the_order_of_one_machine(cluster: Cluster, on_one_machine: Path, launcher: str) -> None:
    output_dir = cluster.run_file.parent / launcher
    run = cluster.evenpack_train(output_dir, slots=1, options=options_of(launcher, cluster))
    assert run.end() == [0], run.log
    assert_same_order(output_dir, on_one_machine)


@pytest.mark.parametrize("launcher", ["pdsh", "openmpi"])
def test_a_hostfile_of_the_other_machine_alone_runs_there(cluster: Cluster, launcher: str) -> None:
    output_dir = cluster.run_file.parent / f"{launcher}_there"
    options = options_of(launcher, cluster).replace(cluster.machines.node1.address, cluster.machines.node2.address)
    run = cluster.evenpack_train(output_dir, "training.steps=5", slots=2, options=options, on=[cluster.machines.node2])
    assert run.end() == [0], run.log
    statuses = [json.loads(path.read_text()) for path in (output_dir / "ranks").glob("rank_*.json")]
    assert [(status["host"], status["state"]) for status in statuses] == [("node2", "finished")] * 2


@pytest.mark.parametrize(("launcher", "slots"), [("pdsh", 1), ("pdsh", 2), ("openmpi", 1)])
def test_a_rank_killed_on_the_other_machine_is_named(cluster: Cluster, launcher: str, slots: int) -> None:
    """With one rank on a machine, nobody there can see it end."""
    output_dir = cluster.run_file.parent / f"{launcher}_killed_{slots}"
    run = cluster.evenpack_train(output_dir, LONG, slots=slots, options=options_of(launcher, cluster))
    run.wait_for_a_checkpoint()
    run.kill_last_rank()
    assert run.end() == [1], run.log
    assert f"\nerror: rank {2 * slots - 1} on node2 " in run.log
    assert "rank 0 on node1" not in run.log


def test_a_machine_that_freezes_is_named(cluster: Cluster) -> None:
    """No connection is closed, as when its power fails: heartbeats show it, though the last tell of the start."""
    output_dir = cluster.run_file.parent / "frozen"
    overrides = [LONG, "run.hang_timeout_seconds=60", "training.checkpoint_every_steps=1"]
    run = cluster.evenpack_train(output_dir, *overrides, slots=2, options=options_of("pdsh", cluster))
    run.wait_for_a_checkpoint()
    frozen = cluster.machines.processes(cluster.machines.node2)
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    assert [process.wait(timeout=HANGS_SECONDS) for process in run.processes] == [1], run.log
    for pid in frozen:
        os.kill(pid, signal.SIGCONT)
    run.end()
    error = run.log.partition("\nerror: ")[2]
    assert re.match(r"rank [23] on node2 failed: no progress for ", error)  # whichever was behind as it froze
    assert "none of the ranks 2 to 3 of its machine answers: the machine is down or not reachable" in error


def test_a_machine_that_is_not_reached_is_named(cluster: Cluster) -> None:
    hostfile = cluster.machines.hostfile(1)
    hostfile.write_text(hostfile.read_text() + "node3 slots=1\n")
    command = ["-m", "evenpack.launcher.cli", "train", str(cluster.run_file), "--hostfile", str(hostfile)]
    command += ["training.packs_per_step=12"]  # which three ranks divide
    run = cluster.start(cluster.run_file.parent / "unreached", {cluster.machines.node1: command})
    assert run.end() == [2]
    assert "1 of 3 machines of " in run.log
    assert "node3: ssh: Could not resolve hostname node3" in run.log


@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
def test_torchrun_starts_ranks_of_both_machines_again(cluster: Cluster, on_one_machine: Path, rendezvous: str) -> None:
    output_dir = cluster.run_file.parent / f"again_{rendezvous}"
    run = cluster.torchrun(output_dir, rendezvous=rendezvous, restarts=1)
    run.wait_for_a_checkpoint()
    run.kill_last_rank()
    assert run.end() == [0, 0], run.log
    assert "continuing after step" in run.log
    assert_same_order(output_dir, on_one_machine)


def test_other_data_on_the_other_machine_is_named(cluster: Cluster) -> None:
    """The same command, but node2 has prepared something else in a folder of its own."""
    output_dir = cluster.run_file.parent / "other_data"
    run = cluster.torchrun(output_dir, of_node2=["run.seed=6"])
    assert [code != 0 for code in run.end()] == [True, True]
    assert "run.seed: 5 on node1; 6 on node2" in run.log
