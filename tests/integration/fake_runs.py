"""Starts runs of fake ranks, and finds the files and processes that they leave."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from run_files import run_values, write_run_file

from evenpack.launch_environment import free_port
from evenpack.launcher.processes.identities import LaunchToken

HERE = Path(__file__).parent

HANGS_SECONDS = 600.0
"""Only what hangs takes so long, on a busy machine too; below the 1000 seconds that fake ranks sleep."""


@dataclass(frozen=True, kw_only=True)
class FakeRun:
    """A folder with a run file whose ranks do what `training` names in `fake_worker.TRAININGS`."""

    folder: Path
    training: str
    started: "list[subprocess.Popen[bytes]]" = field(default_factory=list)

    @classmethod
    def create(cls, folder: Path, training: str) -> "FakeRun":
        run = cls(folder=folder, training=training)
        run.output_dir.mkdir()
        run.pids_dir.mkdir()
        write_run_file(run.run_file, run_values("gpt2", folder, training={"steps": 10000}))
        return run

    @property
    def run_file(self) -> Path:
        return self.folder / "run.yaml"

    @property
    def output_dir(self) -> Path:
        return self.folder / "out"

    @property
    def pids_dir(self) -> Path:
        return self.folder / "pids"

    def environment(self, **more: str) -> dict[str, str]:
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")])),  # empty: here, too
            "FAKE_TRAINING": self.training,
            "FAKE_PIDS": str(self.pids_dir),
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            **more,
        }

    def start(self, command: list[str], *, environment: Mapping[str, str] | None = None, **options: Any) -> Any:
        """Starts a process in a session of its own, with its output in files."""
        with (self.folder / "stdout").open("a") as stdout, (self.folder / "stderr").open("a") as stderr:
            streams = {"stdout": stdout, "stderr": stderr, **options}
            process = subprocess.Popen(
                [sys.executable, *command],
                env=dict(environment or self.environment()),
                start_new_session=True,
                **streams,
            )
        self.started.append(process)
        return process

    def launch(self, *overrides: str, ranks: int = 2, steps: int = 10000, hostfile: str = "", **options: Any) -> Any:
        """Starts the run as `evenpack train` does."""
        arguments = [
            str(self.run_file),
            str(self.output_dir),
            str(ranks),
            hostfile,
            f"training.steps={steps}",
            *overrides,
        ]
        return self.start([str(HERE / "start_fake_run.py"), *arguments], **options)

    def start_ranks(
        self,
        ranks: int,
        *overrides: str,
        machines: int = 1,
        meets: bool = False,
        given: Mapping[int, Sequence[str]] | None = None,
    ) -> list[Any]:
        """Starts ranks as children of this process, with the environment of a launcher.

        Ranks of different `machines` do not watch each other's processes. This process gives several ranks a run id
        unless they are to meet by torch, which fake ranks do not import otherwise. Ranks that are `given` something
        else, by rank, get it instead of run file and overrides.
        """
        token = [f"--evenpack-run={LaunchToken.of_this_process()}"] if ranks > 1 and not meets else []
        local_size = ranks // machines
        place = {
            "WORLD_SIZE": str(ranks),
            "LOCAL_SIZE": str(local_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        return [
            self.start(
                [str(HERE / "fake_worker.py"), *(given or {}).get(rank, (str(self.run_file), *overrides)), *token],
                environment=self.environment(**place, RANK=str(rank), LOCAL_RANK=str(rank % local_size)),
            )
            for rank in range(ranks)
        ]

    def wait_for(self, name: str) -> str:
        """Waits until a rank has written a file of the output directory."""
        path = self.output_dir / name
        wait_until(lambda: path.exists() and path.read_text() != "", f"{name} to appear")
        return path.read_text()

    def pid(self, rank: int) -> int:
        return int((self.pids_dir / str(rank)).read_text())

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Sends a signal to a rank."""
        os.kill(self.pid(rank), number)

    def result(self) -> dict[str, Any]:
        values: dict[str, Any] = json.loads((self.output_dir / "result.json").read_text())
        return values

    def status(self, rank: int) -> dict[str, Any]:
        values: dict[str, Any] = json.loads((self.output_dir / "ranks" / f"rank_{rank}.json").read_text())
        return values

    def failure(self) -> dict[str, Any]:
        """Returns the record of the rank that failed first."""
        (path,) = (self.output_dir / "ranks").glob("failure_*.json")
        values: dict[str, Any] = json.loads(path.read_text())
        return values

    def errors(self) -> str:
        return (self.folder / "stderr").read_text()

    def living(self) -> list[psutil.Process]:
        """Returns every process of this run: `deepspeed`, its launcher, ranks, and their children."""
        found = []
        for process in psutil.process_iter():
            try:
                ours = process.environ().get("FAKE_PIDS") == str(self.pids_dir)
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def close(self) -> list[psutil.Process]:
        """Ends processes that the test has left running; returns those that nothing else would have ended."""
        direct = {process.pid for process in self.started}
        orphans = [process for process in self.living() if process.pid not in direct]
        for process in [*self.started, *orphans]:
            process.kill()
        for process in self.started:
            process.wait()
        return orphans

    def wait_until_nothing_lives(self) -> None:
        wait_until(lambda: not self.living(), f"the end of {self.living()}")


def training(name: str) -> pytest.MarkDecorator:
    """Returns the mark of a test whose `fake_run` does what `name` stands for in `fake_worker.TRAININGS`."""
    return pytest.mark.parametrize("fake_run", [name], indirect=True)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + HANGS_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {HANGS_SECONDS} s in vain for {what}")
        time.sleep(0.1)
