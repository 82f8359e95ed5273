"""The command that starts the ranks of a run: its devices, and the machines of a hostfile.

It is `deepspeed` for the machines of a hostfile, which are reached before anything is started on them, else the quicker
`local_launcher.py`.
"""

import importlib.util
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from evenpack.errors import ConfigError, RunError
from evenpack.files import explained
from evenpack.launch_environment import free_port, own_package, requested_accelerator, without_launcher
from evenpack.launcher.processes.devices import cpu_cores, cuda_devices, require_seen_gpus, visible_devices
from evenpack.launcher.processes.identities import LaunchToken
from evenpack.units import counted

if TYPE_CHECKING:
    from evenpack.engine.config import RunConfig


WORKER_MODULE = "evenpack.launcher.worker"
_DEEPSPEED = "deepspeed.launcher.runner"

LOCAL_LAUNCHER = "evenpack.launcher.processes.local_launcher"

DEFAULT_CPU_RANKS = 2
"""Ranks on the CPU of a machine without a GPU, if it has as many cores: enough to show that ranks work together, and
more only share the same cores."""

_ANSWER_SECONDS = 30
_SHOWN_HOSTS = 5


@dataclass(frozen=True, kw_only=True)
class Devices:
    """The devices of the ranks."""

    kind: str
    """Kind `cuda` or `cpu`; `hosts` for a hostfile's machines."""
    ranks: int
    options: tuple[str, ...]
    """Options of the launcher."""
    choice: str
    """The choice and its reason, in a line."""
    machines: tuple[str, ...] = ()
    """Machines that must be reached; none if ranks are started on this one alone."""


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """The command to start."""

    command: tuple[str, ...]
    """The command as the user could type it."""
    environment: Mapping[str, str]
    """Environment variables in addition to this process's own."""
    devices: Devices

    def reached(self) -> "LaunchPlan":
        """Returns the plan once every machine is reached; see `reached_by_pdsh`. Raises: ConfigError."""
        if not self.devices.machines:
            return self
        found = ("--no_ssh_check", f"--master_addr={reached_by_pdsh(self.devices.machines)}")
        options_at = self.command.index(_DEEPSPEED) + 1
        return replace(self, command=(*self.command[:options_at], *found, *self.command[options_at:]))

    def command_of(self, token: LaunchToken) -> list[str]:
        """Returns the command, whose ranks get the identity of the `evenpack train` to which they belong.

        `deepspeed` searches this for its own options too: a prefix of one of them (`--launch`) would be refused.
        """
        return [*self.command, f"--evenpack-run={token}"]

    def shell_line(self) -> str:
        """Returns the command in a form to be pasted into a shell."""
        return " ".join([*(f"{name}={value}" for name, value in self.environment.items()), shlex.join(self.command)])


def plan_launch(
    run_file: Path,
    overrides: Sequence[str],
    *,
    config: "RunConfig | None" = None,
    num_gpus: int | None,
    hostfile: Path | None,
    cpu_ranks: int | None = None,
    module: str = WORKER_MODULE,
) -> LaunchPlan:
    """Chooses the devices and builds the command.

    Args:
        config: what they say, for which the devices of this machine must do.
        num_gpus: of this machine, or of each machine in `hostfile`; None: all.
        cpu_ranks: that many ranks on this machine's CPU instead; None: GPUs, or two where there is none.

    Raises: ConfigError for missing devices or a wrong hostfile; RunError if DeepSpeed is not installed.
    """
    environment = {"PYTHONUNBUFFERED": "1", **own_package()}
    _require_possible_choice(num_gpus, cpu_ranks, hostfile)
    if importlib.util.find_spec("deepspeed") is None:  # the ranks need it in any case
        raise RunError(f"deepspeed is not installed: {sys.executable} -m pip install deepspeed")
    if hostfile is not None:
        devices = hosts_of(hostfile, num_gpus)
        _refuse_shell_characters([str(run_file), *overrides])
        # failures are reported once, in our own words
        start = [_DEEPSPEED, "--log_level=critical", *devices.options, "--module"]
    else:
        if config is not None and cpu_ranks is None and num_gpus is None:
            require_seen_gpus(config, without_launcher(os.environ))
        devices = local_devices(num_gpus, cpu_ranks)
        start = [LOCAL_LAUNCHER, *devices.options, f"--port={free_port()}"]
    if devices.kind == "cpu":
        environment["DS_ACCELERATOR"] = "cpu"
    command = (sys.executable, "-m", *start, module, str(run_file), *overrides)
    return LaunchPlan(command=command, environment=environment, devices=devices)


def local_devices(num_gpus: int | None, cpu_ranks: int | None = None) -> Devices:
    """Returns this machine's GPUs, all of them or the first `num_gpus`, or ranks on the CPU.

    Ranks are on the CPU if requested, or if nothing is requested and there is no GPU.

    Raises: ConfigError if there are fewer GPUs than requested, or for a DS_ACCELERATOR of another name.
    """
    is_hidden = requested_accelerator(os.environ) == "cpu"
    if cpu_ranks is not None:
        return _on_cpu(cpu_ranks, why="as requested")
    usable = 0 if is_hidden else cuda_devices()  # counting them may import torch
    reason = "DS_ACCELERATOR is cpu" if is_hidden else "PyTorch sees no CUDA device"
    if num_gpus is None and usable == 0:
        return _on_cpu(min(DEFAULT_CPU_RANKS, cpu_cores()), why=f"{reason}; --cpu-ranks chooses another number")
    if num_gpus is not None and num_gpus > usable:
        found = f"this machine shows {counted(usable, 'CUDA device')}" if usable else reason
        raise ConfigError(
            f"--num-gpus {num_gpus}: {found} (`evenpack doctor` lists the devices). For ranks on the CPU say "
            f"--cpu-ranks {num_gpus}. For GPUs of another machine, `evenpack plan` takes --ranks {num_gpus} "
            "--device NAME, as h100"
        )
    ranks = num_gpus or usable
    choice = f"{ranks} of this machine's {counted(usable, 'CUDA device')}"
    options = (f"--devices={','.join(visible_devices(ranks))}",)
    return Devices(kind="cuda", ranks=ranks, options=options, choice=choice)


def _on_cpu(ranks: int, *, why: str) -> Devices:
    cores = cpu_cores()
    share = f"{cores // ranks} of {counted(cores, 'core')} each"
    if ranks > cores:
        share = f"warning: they share {counted(cores, 'core')} and wait for each other, so give at most {cores}"
    choice = f"{counted(ranks, 'rank')} on the CPU ({why}), {share}"
    options = (f"--devices={','.join(map(str, range(ranks)))}",)
    return Devices(kind="cpu", ranks=ranks, options=options, choice=choice)


def _require_possible_choice(num_gpus: int | None, cpu_ranks: int | None, hostfile: Path | None) -> None:
    for option, number in (("--num-gpus", num_gpus), ("--cpu-ranks", cpu_ranks)):
        if number is not None and number < 1:
            raise ConfigError(f"{option} must be at least 1, not {number}")
    if cpu_ranks is not None and num_gpus is not None:
        raise ConfigError(f"--num-gpus {num_gpus} and --cpu-ranks {cpu_ranks} exclude each other: give one of them")
    if cpu_ranks is not None and hostfile is not None:
        raise ConfigError(
            "--cpu-ranks is for this machine alone. The machines of a hostfile choose for themselves: write "
            "DS_ACCELERATOR=cpu into .deepspeed_env, and the ranks as slots into the hostfile"
        )


def hosts_of(hostfile: Path, num_gpus: int | None) -> Devices:
    """Returns the machines of a hostfile as devices.

    Raises: ConfigError with an invalid line, or if a machine has fewer slots than `num_gpus`, which is at least 1.
    """
    slots = read_hostfile(hostfile)
    if num_gpus is not None and num_gpus > min(slots.values()):
        raise ConfigError(f"--num-gpus {num_gpus}: the smallest machine of {hostfile} has {min(slots.values())} slots")
    ranks = sum(slots.values()) if num_gpus is None else num_gpus * len(slots)
    options = [f"--hostfile={hostfile}", *([f"--num_gpus={num_gpus}"] if num_gpus is not None else [])]
    is_here = len(slots) == 1 and is_this_machine(*slots)
    # otherwise `deepspeed` would log in to this machine, or start the ranks of another single one on this one
    options += ["--no_ssh_check", "--master_addr=127.0.0.1"] if is_here else ["--force_multi"]
    return Devices(
        kind="hosts",
        ranks=ranks,
        options=tuple(options),
        choice=f"{counted(ranks, 'rank')} on {counted(len(slots), 'machine')} of {hostfile}",
        machines=() if is_here else tuple(slots),
    )


def _refuse_shell_characters(arguments: Sequence[str]) -> None:
    """Checks an argument, because `deepspeed` hands arguments to other machines' shells without quoting."""
    for argument in arguments:
        if re.search(r"[^\w@%+=:,./-]", argument):
            raise ConfigError(
                f"'{argument}' holds a character that the shells of other machines would interpret; "
                "write it into the run file instead"
            )


def read_hostfile(hostfile: Path) -> dict[str, int]:
    """Returns the slots of each machine, from lines `NAME slots=N`.

    Raises: ConfigError with the invalid line, or if the file cannot be read or is not UTF-8.
    """
    try:
        with explained(hostfile, ConfigError, missing=True):
            lines = hostfile.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ConfigError(f"hostfile {hostfile}: {error}; save it as UTF-8") from error
    slots: dict[str, int] = {}
    for number, text in enumerate(lines, 1):
        line = text.partition("#")[0].strip()
        if not line:
            continue
        match = re.fullmatch(r"([^\s-]\S*)\s+slots=([1-9]\d*)(\s.*)?", line)  # ssh takes -NAME for an option
        if match is None:
            raise ConfigError(f"{hostfile}, line {number}: expected 'NAME slots=N', found '{line}'")
        if match[1] in slots:
            raise ConfigError(f"{hostfile}, line {number}: {match[1]} is named twice")
        slots[match[1]] = int(match[2])
    if not slots:
        raise ConfigError(f"hostfile {hostfile} names no machine: expected lines 'NAME slots=N'")
    return slots


def is_this_machine(name: str) -> bool:
    """Returns whether a name in a hostfile is this machine's for certain: its host name, `localhost`, or an address.

    Names are not looked up, because ssh may have an address of its own for them. A name of this machine that is not
    recognised costs a log-in from this machine to itself; another machine's must never be taken for this one's.
    """
    addresses = {address.address for of_port in psutil.net_if_addrs().values() for address in of_port}
    return name in {"localhost", socket.gethostname(), *addresses}


def reached_by_pdsh(machines: Sequence[str]) -> str:
    """Logs in to every machine as `deepspeed` will, and returns the first address of the first machine.

    `deepspeed` itself looks at the first machine only, without the options that pdsh takes from PDSH_SSH_ARGS_APPEND.

    Raises: ConfigError with the machines that do not answer, or if pdsh is not installed.
    """
    if shutil.which("pdsh") is None:
        raise ConfigError(
            "--hostfile needs pdsh, which is not installed here (Debian: apt-get install pdsh). docs/running.md says "
            "how other launchers start the ranks"
        )
    ssh_options = f"{os.environ.get('PDSH_SSH_ARGS_APPEND', '')} -o BatchMode=yes"  # and pdsh's -o ConnectTimeout=10
    done = subprocess.run(
        ["pdsh", "-S", "-R", "ssh", "-u", str(_ANSWER_SECONDS), "-w", ",".join(machines), "hostname", "-I"],
        env={**os.environ, "PDSH_SSH_ARGS_APPEND": ssh_options},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    answers = dict(re.findall(r"^(\S+): (.*\S)", done.stdout, re.MULTILINE))
    said = dict(re.findall(r"^(?!pdsh@)(\S+): (.*)", done.stderr, re.MULTILINE))
    failed = dict(reversed(re.findall(r"^pdsh@\S+: (\S+): (.*)", done.stderr, re.MULTILINE)))  # the first line counts
    addresses: list[str] = []
    unreached: list[str] = []
    for machine in machines:
        label = machine.rpartition("@")[2]
        if label not in answers | failed:
            label = label.partition(".")[0]  # pdsh leaves a domain out that all have
        if label in failed or label not in answers:
            problem = said.get(label) or failed.get(label) or (done.stderr.splitlines() or ["no answer"])[-1]
            unreached.append(f"\n  {machine}: {problem}")
        else:
            addresses.append(answers[label].split()[0])
    if unreached:
        more = f"\n  and {len(unreached) - _SHOWN_HOSTS} more" if len(unreached) > _SHOWN_HOSTS else ""
        raise ConfigError(
            f"{len(unreached)} of {len(machines)} machines of the hostfile are not reached by ssh without a password:"
            f"{''.join(unreached[:_SHOWN_HOSTS])}{more}\nTry `ssh HOST hostname`. An ssh configuration of your own "
            "goes into PDSH_SSH_ARGS_APPEND='-F FILE'"
        )
    return addresses[0]
