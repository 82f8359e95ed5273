"""Runs studies for `evenpack study` and for the library, each on its input and devices.

Studies of runs get this machine as groups of devices, each with one `evenpack` command at a time. Each command is a
process of its own, in a session of its own: a terminal's Ctrl-C reaches only the study, which passes it on to
`evenpack train`. If the study is killed, they end as after a SIGTERM.
"""

import os
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from evenpack.console import Report
from evenpack.engine.config import RunConfig
from evenpack.errors import ConfigError
from evenpack.launch_environment import own_package, requested_accelerator
from evenpack.launcher.processes.devices import (
    choose_accelerator,
    cpu_cores,
    cuda_devices,
    settle_device,
    visible_devices,
)
from evenpack.launcher.processes.holding import held_output_dir
from evenpack.launcher.processes.identities import RankPlace
from evenpack.launcher.processes.stop import handled_stop_signals, named_as_starter, say
from evenpack.launcher.worker import share_cores
from evenpack.studies.lengths.options import SubjectOptions
from evenpack.studies.registry import LengthsStudy, RunStudy
from evenpack.studies.runs.command import TrainedStudyCommand

if TYPE_CHECKING:
    from evenpack.studies.lengths.subject import Subject


def study_lengths(study: LengthsStudy, lengths: str, overrides: Sequence[str], options: SubjectOptions) -> Report:
    """Runs a study of lengths, which checks its options before the lengths are read."""
    if study.uses_device():
        settle_device()
    from evenpack.studies.lengths.subject import find_subject

    def find(other: str | None = None) -> "Subject":
        """Finds INPUT, or another list of lengths with the same options."""
        return find_subject(lengths, overrides, options) if other is None else find_subject(other, [], options)

    return study.run(find)


def study_run(study: RunStudy, config: RunConfig) -> Report:
    """Runs a study of a prepared run on this rank's share of the machine."""
    share_cores(RankPlace.of_environment(os.environ))  # before torch is imported
    settle_device()
    return study.run(config)


def study_runs(study: TrainedStudyCommand, study_file: Path, overrides: Sequence[str]) -> Report:
    """Runs a study that trains runs in processes of their own."""
    choose_accelerator()
    return study.run(study_file, overrides, ThisMachine())


_COMMAND = (sys.executable, "-m", "evenpack.launcher.cli")


@dataclass(frozen=True, kw_only=True)
class DeviceGroup:
    """Devices of this machine that one run gets; a `RunDevices` of the studies."""

    ranks: int
    train_options: tuple[str, ...]
    environment: dict[str, str]
    """Environment variables in addition to this process's own."""
    started: Callable[[subprocess.Popen[bytes]], None]
    """Called with each started process."""

    def start(
        self, command: str, run_file: Path, overrides: Sequence[str], *, log: Path, options: Sequence[str] = ()
    ) -> subprocess.Popen[bytes]:
        of_devices = self.train_options if command == "train" else ()
        with log.open("ab") as output:
            process = subprocess.Popen(
                [*_COMMAND, command, str(run_file), *overrides, *options, *of_devices],
                env={**os.environ, **own_package(), **self.environment, **named_as_starter()},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.started(process)
        return process


class ThisMachine:
    """A `Machine` of the studies."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._asked_to_stop = False

    @property
    def is_stop_requested(self) -> bool:
        return self._asked_to_stop

    def device_groups(self, devices_per_run: int | None) -> list[DeviceGroup]:
        """Returns GPUs if there are any, else CPU cores, a rank on each; surplus devices stay idle.

        Raises: ConfigError for a number that is not there.
        """
        if devices_per_run is not None and devices_per_run < 1:
            raise ConfigError(f"--devices-per-run must be at least 1, found {devices_per_run}")
        gpus = 0 if requested_accelerator(os.environ) == "cpu" else cuda_devices()
        devices = visible_devices(gpus) if gpus else [str(core) for core in range(cpu_cores())]
        size = devices_per_run or len(devices)
        if size > len(devices):
            kind = "CUDA devices" if gpus else "cores of the CPU"
            raise ConfigError(f"--devices-per-run {size}: this machine shows {len(devices)} {kind}")
        groups = [devices[first : first + size] for first in range(0, len(devices) - size + 1, size)]
        return [self._group(group, has_gpus=gpus > 0) for group in groups]

    @contextmanager
    def held(self, output_dir: Path) -> Iterator[None]:
        with held_output_dir(output_dir), handled_stop_signals(self._on_signal):
            try:
                yield
            finally:
                self._end_processes()

    def _group(self, devices: Sequence[str], *, has_gpus: bool) -> DeviceGroup:
        option, environment = "--cpu-ranks", {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        if has_gpus:
            option, environment = "--num-gpus", {"CUDA_VISIBLE_DEVICES": ",".join(devices)}
        return DeviceGroup(
            ranks=len(devices),
            train_options=(option, str(len(devices))),
            environment=environment,
            started=self._processes.append,
        )

    def _on_signal(self, number: int, _frame: types.FrameType | None) -> None:
        """Passes on each signal: a run that gets two stops immediately."""
        if not self._asked_to_stop:
            say("stopping: each run saves at the end of its step; run the same command again to continue")
        self._asked_to_stop = True
        self._tell(number)

    def _tell(self, number: int) -> None:
        for process in self._processes:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    process.send_signal(number)

    def _end_processes(self) -> None:
        """Ends the processes of a study that ends with an error while runs continue."""
        self._tell(signal.SIGTERM)
        for process in self._processes:
            process.wait()
