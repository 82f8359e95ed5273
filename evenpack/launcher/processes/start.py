"""The command that starts the ranks of a run: its devices and options, and the machines of a hostfile.

It is `deepspeed` for the machines of a hostfile and with options of it, else the quicker `local_launcher.py`. Machines
are reached before anything is started on them.
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from evenpack.errors import ConfigError, RunError
from evenpack.files import explained
from evenpack.launch_environment import free_port, requested_accelerator, shell_words, ssh_arguments, without_launcher
from evenpack.launcher.processes.devices import cpu_cores, cuda_devices, require_seen_gpus
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

_DEEPSPEED_HOSTFILE = Path("/job/hostfile")
"""The hostfile that `deepspeed` uses by default."""

_OWN_OPTIONS = (
    "-H",
    "--hostfile",
    "--num_gpus",
    "--num_accelerators",
    "--num_nodes",
    "-i",
    "--include",
    "-e",
    "--exclude",
    "--module",
    "--no_python",
)
"""Options of `deepspeed` that decide the number of ranks and their program, which evenpack sets itself."""


@dataclass(frozen=True, kw_only=True)
class Devices:
    """The devices of the ranks."""

    kind: str
    """Kind `cuda` or `cpu`; `hosts` for a hostfile's machines."""
    ranks: int
    options: tuple[str, ...]
    """Options of `deepspeed`."""
    choice: str
    """The choice and its reason, in a line."""
    numbers: str = ""
    """Numbers of this machine's devices, with commas; empty for a hostfile."""
    spans_machines: bool = False
    """Whether ranks are started on other machines than this one, which must be reached."""


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """The command to start."""

    command: tuple[str, ...]
    """The command as the user could type it."""
    environment: Mapping[str, str]
    """Environment variables in addition to this process's own."""
    devices: Devices
    hostfile: Path | None
    """None: this machine alone."""
    extra: tuple[str, ...]
    """Options of `deepspeed` that the user gave."""

    def reached(self, environment: Mapping[str, str]) -> "LaunchPlan":
        """Returns the plan once every machine is reached; see `reached_by_pdsh`. Raises: ConfigError."""
        if self.hostfile is None or not self.devices.spans_machines:
            return self
        found = reached_by_pdsh(self.hostfile, self.extra, environment)
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
    deepspeed_options: str = "",
    module: str = WORKER_MODULE,
) -> LaunchPlan:
    """Chooses the devices and builds the command.

    Args:
        config: what they say, for which the devices of this machine must do.
        num_gpus: of this machine, or of each machine in `hostfile`; None: all.
        cpu_ranks: that many ranks on this machine's CPU instead; None: GPUs, or two where there is none.

    Raises: ConfigError for missing devices or a wrong hostfile; RunError if DeepSpeed is not installed.
    """
    extra = _checked_options(deepspeed_options)
    environment = {"PYTHONUNBUFFERED": "1"}
    _require_possible_choice(num_gpus, cpu_ranks, hostfile)
    if importlib.util.find_spec("deepspeed") is None:  # the ranks need it in any case
        raise RunError(f"deepspeed is not installed: {sys.executable} -m pip install deepspeed")
    if hostfile is not None:
        _require_pdsh_for_fewer_gpus(num_gpus, extra)
        devices = hosts_of(hostfile, num_gpus)
        _refuse_shell_characters([str(run_file), *overrides])
    else:
        if config is not None and cpu_ranks is None and num_gpus is None:
            require_seen_gpus(config, without_launcher(os.environ))
        cuda_count = cuda_devices() if cpu_ranks is None else 0  # counting them imports torch
        devices = local_devices(num_gpus, cpu_ranks, cuda_count=cuda_count, environment=os.environ)
    if devices.kind == "cpu":
        environment["DS_ACCELERATOR"] = "cpu"
    if hostfile is None and not extra:
        start = [sys.executable, "-m", LOCAL_LAUNCHER, f"--devices={devices.numbers}", f"--port={free_port()}"]
    else:
        if hostfile is None:
            extra = [*_local_options(extra), *extra]
        # failures are reported once, in our own words
        start = [sys.executable, "-m", _DEEPSPEED, "--log_level=critical"]
        start += [*devices.options, *extra, "--module"]
    command = [*start, module, str(run_file), *overrides]
    return LaunchPlan(
        command=tuple(command), environment=environment, devices=devices, hostfile=hostfile, extra=tuple(extra)
    )


def _plan_elsewhere(num_gpus: int) -> str:
    return f"For GPUs of another machine, `evenpack plan` takes --ranks {num_gpus} --device NAME, as h100"


def local_devices(
    num_gpus: int | None, cpu_ranks: int | None = None, *, cuda_count: int, environment: Mapping[str, str]
) -> Devices:
    """Returns this machine's GPUs, all of them or the first `num_gpus`, or ranks on the CPU.

    Ranks are on the CPU if requested, or if nothing is requested and there is no GPU.

    Raises: ConfigError if there are fewer GPUs than requested, or for a DS_ACCELERATOR of another name.
    """
    hidden = requested_accelerator(environment) == "cpu"
    if cpu_ranks is not None:
        return _on_cpu(cpu_ranks, why="as requested")
    usable = 0 if hidden else cuda_count
    reason = "DS_ACCELERATOR is cpu" if hidden else "PyTorch sees no CUDA device"
    if num_gpus is None and usable == 0:
        return _on_cpu(min(DEFAULT_CPU_RANKS, cpu_cores()), why=f"{reason}; --cpu-ranks chooses another number")
    if num_gpus is not None and usable == 0:
        raise ConfigError(
            f"--num-gpus {num_gpus}: {reason} (`evenpack doctor` lists the devices). For ranks on the CPU say "
            f"--cpu-ranks {num_gpus}. {_plan_elsewhere(num_gpus)}"
        )
    if num_gpus is not None and num_gpus > usable:
        raise ConfigError(
            f"--num-gpus {num_gpus}: this machine shows {counted(usable, 'CUDA device')}. {_plan_elsewhere(num_gpus)}"
        )
    ranks = num_gpus or usable
    visible = environment.get("CUDA_VISIBLE_DEVICES", "")
    if not visible:
        numbers = _numbers(ranks)
        options = (f"--num_gpus={ranks}",)
    else:  # with --num_gpus `deepspeed` would ignore the variable and take devices from 0 on
        chosen = visible.split(",")[:ranks]
        if not all(device.strip().isdigit() for device in chosen):
            raise ConfigError(
                f"CUDA_VISIBLE_DEVICES={visible}: `deepspeed` takes devices by number only, for example 0,1"
            )
        numbers = ",".join(device.strip() for device in chosen)
        options = (f"--include=localhost:{numbers}",)
    choice = f"{ranks} of this machine's {counted(usable, 'CUDA device')}"
    return Devices(kind="cuda", ranks=ranks, options=options, choice=choice, numbers=numbers)


def _on_cpu(ranks: int, *, why: str) -> Devices:
    cores = cpu_cores()
    share = f"{cores // ranks} of {counted(cores, 'core')} each"
    if ranks > cores:
        share = f"warning: they share {counted(cores, 'core')} and wait for each other, so give at most {cores}"
    choice = f"{counted(ranks, 'rank')} on the CPU ({why}), {share}"
    return Devices(kind="cpu", ranks=ranks, options=(f"--num_gpus={ranks}",), choice=choice, numbers=_numbers(ranks))


def _numbers(ranks: int) -> str:
    return ",".join(map(str, range(ranks)))


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
    machines, is_remote = counted(len(slots), "machine"), True
    if len(slots) == 1:
        machines = next(iter(slots))
        is_remote = not is_this_machine(machines)
        if is_remote:
            options.append("--force_multi")  # otherwise `deepspeed` would start the only machine's ranks on this one
    return Devices(
        kind="hosts",
        ranks=ranks,
        options=tuple(options),
        choice=f"{counted(ranks, 'rank')} on {machines} of {hostfile}",
        spans_machines=is_remote,
    )


def _local_options(extra: Sequence[str]) -> list[str]:
    options = []
    if not any(option.startswith("--master_port") for option in extra):
        options.append(f"--master_port={free_port()}")  # two runs on one machine need two
    if _DEEPSPEED_HOSTFILE.is_file():
        options.append(f"--hostfile={os.devnull}")  # otherwise it would use that file's machines
    return options


def _checked_options(deepspeed_options: str) -> list[str]:
    options = shell_words("--deepspeed-options", deepspeed_options)
    for option in options:
        if _is_own(option):
            raise ConfigError(
                f"--deepspeed-options: {option} decides which ranks there are; use --num-gpus, --cpu-ranks and "
                "--hostfile instead"
            )
    return options


def _is_own(option: str) -> bool:
    """Returns whether argparse may take it for one of `_OWN_OPTIONS`: it takes the beginnings of long ones as well."""
    name = option.partition("=")[0]
    if " " in name:  # a value
        return False
    if name.startswith("--"):
        return len(name) > 2 and any(own.startswith(name) for own in _OWN_OPTIONS)
    return name[:2] in _OWN_OPTIONS


def _require_pdsh_for_fewer_gpus(num_gpus: int | None, extra: Sequence[str]) -> None:
    launcher = launcher_of(extra)
    if num_gpus is not None and launcher != "pdsh":
        raise ConfigError(
            f"--num-gpus {num_gpus}: with --launcher {launcher} DeepSpeed uses all slots of a hostfile; write "
            f"slots={num_gpus} into it for each machine, and leave --num-gpus out"
        )


def _refuse_shell_characters(arguments: Sequence[str]) -> None:
    """Checks an argument, because `deepspeed` hands arguments to other machines' shells without quoting."""
    for argument in arguments:
        if re.search(r"[^\w@%+=:,./-]", argument):
            raise ConfigError(
                f"'{argument}' holds a character that the shells of other machines would interpret; "
                "write it into the run file instead"
            )


_CONNECT_SECONDS = 10
_ANSWER_SECONDS = 30.0
_AT_ONCE = 32
_SHOWN_HOSTS = 5


def read_hostfile(hostfile: Path) -> dict[str, int]:
    """Returns the slots of each machine, from lines `NAME slots=N`.

    Raises: ConfigError with the invalid line, or if the file cannot be read or is not UTF-8.
    """
    try:
        with explained(hostfile, ConfigError, missing=True):
            lines = hostfile.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"hostfile {hostfile}: expected lines 'NAME slots=N' in UTF-8, found {error.object[error.start]:#04x} at "
            f"byte {error.start}; save it as UTF-8"
        ) from error
    slots: dict[str, int] = {}
    for number, text in enumerate(lines, 1):
        line = text.partition("#")[0].strip()
        if not line:
            continue
        match = re.fullmatch(r"(\S+)\s+slots=(\d+)(\s.*)?", line)
        if match is None or int(match[2]) < 1:
            raise ConfigError(f"{hostfile}, line {number}: expected 'NAME slots=N', found '{line}'")
        if match[1].startswith("-"):
            raise ConfigError(
                f"{hostfile}, line {number}: ssh would take {match[1]} for an option: give the name alone"
            )
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


def reached_by_pdsh(hostfile: Path, deepspeed_options: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Logs in to every machine as pdsh will, and returns options of `deepspeed` that follow from it.

    `deepspeed` looks at the first machine only, without the options that pdsh takes from PDSH_SSH_ARGS_APPEND. So it is
    told that this has been done, and the address of the first machine. Other launchers than pdsh, and
    `--no_ssh_check`, get nothing: they log in by means of their own, or not at all. `--launcher pdsh` says what
    `deepspeed` does without it.

    Raises: ConfigError with the machines that are not reached, or if pdsh is not installed.
    """
    given = [option.partition("=")[0] for option in deepspeed_options]
    if launcher_of(deepspeed_options) != "pdsh" or {"--no_ssh_check", "--no_ssh"} & set(given):
        return []
    if shutil.which("pdsh", path=environment.get("PATH")) is None:
        raise ConfigError(
            "--hostfile needs pdsh, which is not installed here (Debian: apt-get install pdsh). Open MPI works too: "
            "--deepspeed-options '--launcher openmpi'"
        )
    ssh = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_SECONDS}"]
    ssh += ssh_arguments(environment)
    ssh += ["-p", _value(deepspeed_options, "--ssh_port")] if "--ssh_port" in given else []
    hosts = list(read_hostfile(hostfile))
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = list(pool.map(lambda host: _log_in(host, ssh, environment), hosts))
    unreached = [answer for answer in answers if answer.problem is not None]
    if unreached:
        shown = "".join(f"\n  {answer.host}: {answer.problem}" for answer in unreached[:_SHOWN_HOSTS])
        more = f"\n  and {len(unreached) - _SHOWN_HOSTS} more" if len(unreached) > _SHOWN_HOSTS else ""
        raise ConfigError(
            f"{len(unreached)} of {len(hosts)} machines of {hostfile} are not reached by ssh without a password:"
            f"{shown}{more}\nTry `ssh HOST hostname`. An ssh configuration of your own goes into "
            "PDSH_SSH_ARGS_APPEND='-F FILE'; --deepspeed-options '--no_ssh_check' leaves this check out"
        )
    options = ["--no_ssh_check"]
    if "--master_addr" not in given and answers[0].address:
        options.append(f"--master_addr={answers[0].address}")
    return options


def launcher_of(deepspeed_options: Sequence[str]) -> str:
    """Returns what `deepspeed` reaches other machines with, in lower case."""
    return _value(deepspeed_options, "--launcher").lower() or "pdsh"


@dataclass(frozen=True, kw_only=True)
class _Answer:
    host: str
    address: str
    """The machine's first address; empty if it did not say it."""
    problem: str | None


def _log_in(host: str, ssh: Sequence[str], environment: Mapping[str, str]) -> _Answer:
    try:
        done = subprocess.run(
            [*ssh, host, "hostname", "-I"],
            capture_output=True,
            text=True,
            timeout=_ANSWER_SECONDS,
            stdin=subprocess.DEVNULL,
            env=dict(environment),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return _Answer(host=host, address="", problem=f"no answer within {_ANSWER_SECONDS:g} s")
    except OSError as error:
        return _Answer(host=host, address="", problem=f"ssh cannot be started: {error.strerror}")
    said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    address = (done.stdout.split() or [""])[0]
    return _Answer(host=host, address=address, problem=None if done.returncode == 0 else said)


def _value(options: Sequence[str], name: str) -> str:
    """Returns the value of an option, written as `NAME VALUE` or `NAME=VALUE`; the last one counts; empty without."""
    value = ""
    for option, following in zip(options, (*options, "")[1:], strict=True):
        if option.startswith(f"{name}="):
            value = option.partition("=")[2]
        if option == name:
            value = following
    return value
