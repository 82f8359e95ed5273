"""The machines of a hostfile: read, and reached before anything is started on them."""

import re
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil

from evenpack.errors import ConfigError
from evenpack.launch_environment import ssh_arguments

_CONNECT_SECONDS = 10
_ANSWER_SECONDS = 30.0
_AT_ONCE = 32
_SHOWN_HOSTS = 5


def read_hostfile(hostfile: Path) -> dict[str, int]:
    """Returns the slots of each machine, from lines `NAME slots=N`.

    Raises: ConfigError with the invalid line, or if the file cannot be read or is not UTF-8.
    """
    try:
        lines = hostfile.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"hostfile {hostfile} cannot be read: {error.strerror}") from error
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
