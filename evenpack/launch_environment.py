"""The environment variables of launchers, read and checked in one place.

torchrun's names come first, then the names of DeepSpeed, of Open MPI and of the MPICH family (also Intel's and Cray's).
Errors name the variable, its value and what was expected: a value that is wrong is never taken for one that is not set.
"""

import os
import random
import re
import shlex
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from evenpack.errors import ConfigError

_REMEDY = "launchers set this; where a script or a shell did, correct it or unset it"


def own_package() -> dict[str, str]:
    """Returns the variable with which a started Python on this machine imports this package, too.

    Else it would take a package `evenpack` of the current folder, such as another checkout, before the installed one.
    """
    with suppress(OSError):  # the current folder may be gone
        if Path(__file__).parents[1] == Path.cwd():
            return {}
    return {"PYTHONSAFEPATH": "1"}


@dataclass(frozen=True, kw_only=True)
class WholeNumber:
    """A whole number that launchers pass on, each under a name of its own."""

    names: tuple[str, ...]
    least: int
    most: int | None = None

    def found_in(self, environment: Mapping[str, str]) -> str | None:
        """Returns the name under which it is set; None if it is not set."""
        return next((name for name in self.names if name in environment), None)

    def read(self, environment: Mapping[str, str]) -> int | None:
        """Returns the value; None if it is not set. Raises: ConfigError for anything but such a number."""
        name = self.found_in(environment)
        if name is None:
            return None
        text = environment[name].strip()
        is_number = text.isascii() and text.isdecimal() and len(text) < _MOST_DIGITS
        if not is_number or int(text) < self.least or (self.most is not None and int(text) > self.most):
            bounds = f"of {self.least} or more" if self.most is None else f"from {self.least} to {self.most}"
            raise ConfigError(
                f"environment variable {name}={environment[name]!r:.80}: expected a whole number {bounds}; {_REMEDY}"
            )
        return int(text)


_MOST_DIGITS = 10

RANK = WholeNumber(names=("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"), least=0)
WORLD_SIZE = WholeNumber(names=("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"), least=1)
LOCAL_RANK = WholeNumber(names=("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"), least=0)
LOCAL_WORLD_SIZE = WholeNumber(
    names=("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"), least=1
)
MASTER_PORT = WholeNumber(names=("MASTER_PORT",), least=1, most=(1 << 16) - 1)
MACHINE = WholeNumber(names=("CROSS_RANK",), least=0)
"""DeepSpeed's number of a machine in the hostfile."""
MPI_WORLD_SIZE = WholeNumber(names=WORLD_SIZE.names[1:], least=1)
MPI_LOCAL_SIZE = WholeNumber(names=LOCAL_WORLD_SIZE.names[2:], least=1)
SLURM_TASKS = WholeNumber(names=("SLURM_STEP_NUM_TASKS",), least=1)
MAX_RESTARTS = WholeNumber(names=("TORCHELASTIC_MAX_RESTARTS",), least=0)
RUST_THREADS = WholeNumber(names=("RAYON_NUM_THREADS",), least=0)
"""Threads of the tokenizers' library, whose 0 means all cores."""

AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""Set by torchrun: it holds the store in which its ranks meet."""

_OF_RANKS = (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE)
_OF_TASKS = ("PMI_", "MPI_")
"""What names begin with that `srun` may set for a task in which another launcher starts the ranks."""

_ACCELERATORS = ("cpu", "cuda")


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment for a launcher of ranks, without what another one has left in it, as in a shell."""
    left = {name for variable in (*_OF_RANKS, MACHINE, MAX_RESTARTS) for name in variable.names} | {AGENT_STORE}
    return {name: value for name, value in environment.items() if name not in left}


def check_ranks(environment: Mapping[str, str]) -> None:
    """Checks all numbers of ranks, and that they fit together. Raises: ConfigError naming the variables."""
    _refuse_two_values(environment)
    for lower, upper in ((RANK, WORLD_SIZE), (LOCAL_RANK, LOCAL_WORLD_SIZE)):
        number, size = lower.read(environment), upper.read(environment)
        if number is not None and size is not None and number >= size:
            raise ConfigError(
                f"environment variables {lower.found_in(environment)}={number} and {upper.found_in(environment)}="
                f"{size}: ranks are numbered 0 to {size - 1}; {_REMEDY}"
            )
    local, size = LOCAL_WORLD_SIZE.read(environment), WORLD_SIZE.read(environment)
    if local is not None and local > (size or 1):
        whole = "no WORLD_SIZE" if size is None else f"{WORLD_SIZE.found_in(environment)}={size}"
        raise ConfigError(
            f"environment variables {LOCAL_WORLD_SIZE.found_in(environment)}={local} and {whole}: a machine has at "
            f"most all ranks; {_REMEDY}"
        )
    for variable in (MASTER_PORT, MACHINE, MAX_RESTARTS):
        variable.read(environment)
    requested_accelerator(environment)


def _refuse_two_values(environment: Mapping[str, str]) -> None:
    """Refuses values of two launchers, of which each reader would take another. Raises: ConfigError."""
    contradictions: list[list[str]] = []
    for variable in _OF_RANKS:
        names = [name for name in variable.names if name in environment and not name.startswith(_OF_TASKS)]
        values = {WholeNumber(names=(name,), least=variable.least).read(environment) for name in names}
        contradictions += [names] if len(values) > 1 else []
    if contradictions:
        shown = ", ".join(" and ".join(f"{name}={environment[name]}" for name in names) for names in contradictions)
        left = " ".join(f"-u {names[-1]}" for names in contradictions)
        raise ConfigError(
            f"environment variables {shown} contradict each other: some were left by another launcher, perhaps in "
            f"this shell; unset them (`env {left} ...`), or start with `evenpack train`, which does"
        )


def requested_accelerator(environment: Mapping[str, str]) -> str | None:
    """Returns the kind of device that DS_ACCELERATOR asks for, `cpu` or `cuda`; None if it is not set.

    Raises: ConfigError for any other.
    """
    found = environment.get("DS_ACCELERATOR")
    if found is not None and found not in _ACCELERATORS:
        raise ConfigError(
            f"environment variable DS_ACCELERATOR={found!r:.80}: expected {' or '.join(_ACCELERATORS)}, the devices on "
            "which evenpack runs; unset it to take GPUs if there are any"
        )
    return found


def shell_words(origin: str, text: str) -> list[str]:
    """Splits a text as a shell does; `origin` is what it was given for. Raises: ConfigError if a shell could not."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{origin}={text!r:.80}: expected words that are quoted as in a shell ({error})") from error


def refuse_other_options(words: Sequence[str]) -> None:
    """Refuses options of other programs. Raises: ConfigError for a key with dashes, and for DeepSpeed's own file."""
    for option in (word for word in words if word.startswith("--")):
        name, _, value = option.removeprefix("--").partition("=")
        if name in ("deepspeed", "deepspeed_config", "deepspeed-config"):
            raise ConfigError(
                f"--{name}: DeepSpeed's configuration is made of the run file: give your own keys in deepspeed.extra,"
                " for example deepspeed.extra.wall_clock_breakdown=true; ZeRO's stage is deepspeed.zero_stage"
            )
        if re.fullmatch(r"\w+(\.\w+)+", name):
            raise ConfigError(f"{option}: a key of the run file is given without dashes: {name}={value or 'VALUE'}")


def choose_cpu() -> None:
    """Tells DeepSpeed that there is only the CPU, unless the user names another device."""
    os.environ.setdefault("DS_ACCELERATOR", _ACCELERATORS[0])


def free_port() -> int:
    """Returns an unused TCP port, below those that Linux gives to connections: these could take it meanwhile."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
