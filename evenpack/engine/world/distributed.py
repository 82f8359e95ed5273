"""The ranks of a run: how this process joins them, and their communication outside of training."""

import gc
import importlib.util
import logging
import os
import platform
import socket
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from jaxtyping import Float64
from torch import Tensor

from evenpack.console import log_to_stderr
from evenpack.engine.activity import doing
from evenpack.engine.world.agreement import machine_facts, require_agreement
from evenpack.engine.world.meeting import Meeting
from evenpack.errors import EvenpackError, RunError
from evenpack.files import explained
from evenpack.launch_environment import (
    AGENT_STORE,
    LOCAL_RANK,
    MASTER_PORT,
    MPI_LOCAL_SIZE,
    RANK,
    SLURM_TASKS,
    WORLD_SIZE,
    check_ranks,
    choose_cpu,
    free_port,
    requested_accelerator,
)
from evenpack.units import counted

ResultT = TypeVar("ResultT")

AGREEMENT = "agreement"
"""Purpose of the meeting before the ranks join."""

_MPI_PORT = "29500"
"""torch's default port, because mpirun provides none."""

_PCI_DEVICES = Path("/sys/bus/pci/devices")
_THREADS = Path("/proc/self/task")
"""Where Linux tells the cores beside a device, and the threads of this process."""


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among the ranks of the run. A world of one needs no process group."""

    rank: int
    size: int
    local_rank: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which logs and writes single files."""
        return self.rank == 0

    @property
    def device_name(self) -> str:
        """Name for people and cost models: the GPU's, or the processor's and the threads of a rank."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        threads = torch.get_num_threads()
        return f"CPU ({_processor()}), {counted(threads, 'thread')} a rank"

    def all_sum(self, vector: Float64[Tensor, " n"], *, maxima: int = 0) -> Float64[Tensor, " n"]:
        """Returns the sum over the ranks, element by element, on the CPU; synchronises with the device once.

        For the last `maxima` elements the maximum is taken instead of the sum.
        """
        if self.size > 1:
            vector = vector.to(self.device, copy=True)
            sums = len(vector) - maxima
            dist.all_reduce(vector[:sums])
            if maxima:
                dist.all_reduce(vector[sums:], op=dist.ReduceOp.MAX)
        return vector.cpu()

    def any(self, flag: bool) -> bool:
        """Returns whether it is true on one rank or more; every rank calls it."""
        return self.all_sum(torch.tensor([float(flag)], dtype=torch.float64)).item() > 0.0

    def all_gather(self, value: ResultT) -> list[ResultT]:
        """Returns the picklable `value` of every rank, in the order of ranks."""
        values: list[Any] = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: ResultT) -> ResultT:
        """Returns rank 0's picklable `value` on every rank."""
        values = [value]
        if self.size > 1:
            dist.broadcast_object_list(values, src=0, device=self.device)
        return values[0]

    def on_main(self, action: Callable[[], ResultT]) -> ResultT:
        """Runs `action` on rank 0; every rank gets its result, or its error if the user can correct it.

        `action` waits for no other rank.
        """
        outcome: tuple[ResultT | None, EvenpackError | None] = (None, None)
        if self.is_main:
            try:
                outcome = (action(), None)
            except EvenpackError as error:
                outcome = (None, error)
        result, problem = self.broadcast(outcome)
        if problem is not None:
            raise problem
        return result  # type: ignore[return-value]  # None only where the action returned it

    @contextmanager
    def together(self) -> Iterator[None]:
        """Runs the block on every rank; where it fails, every rank gets the error of the first rank that has one.

        This holds for errors that the user can correct. A block must not raise one where others still wait for it.
        """
        problem = None
        try:
            yield
        except EvenpackError as error:
            problem = error
        for found in self.all_gather(problem):
            if found is not None:
                raise found

    def barrier(self) -> None:
        """Waits until every rank is here."""
        if self.size > 1:
            dist.barrier()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


@contextmanager
def joined_world(
    facts: Mapping[str, str] | None = None,
    *,
    patience: timedelta | None = None,
) -> Iterator[World]:
    """Joins the ranks that `deepspeed`, `torchrun` or `mpirun` started; without a launcher this process is alone.

    `facts`, besides device and versions, must be the same on all ranks before they join: see `train.run_facts`.
    A collective of the world fails if a rank comes later than the others by `patience`; None: torch's default.
    At the end of the block nothing may hold a DeepSpeed engine any more. After an error the groups are left as they
    are, because the other ranks may wait in one of them: the process should end by `os._exit`.

    Raises: ConfigError if the launcher's environment is wrong; RunError if it is incomplete, the rank has no device, a
    rank does not come, or the ranks do not agree.
    """
    _, size, local_rank = complete_environment(os.environ)
    deepspeed = quiet_deepspeed()
    accelerator = deepspeed.get_accelerator()
    if accelerator.device_name() != "cpu":
        if local_rank >= accelerator.device_count():
            raise RunError(
                f"local rank {local_rank} of {socket.gethostname()} has no device of its own: that machine shows "
                f"{accelerator.device_count()}; start at most one rank for each device (slots of the hostfile)"
            )
        accelerator.set_device(local_rank)
        if accelerator.device_name() == "cuda":
            bind_to_cores_of(torch.cuda.get_device_properties(local_rank))
    meeting = None if size == 1 else meet(AGREEMENT)
    if meeting is not None:
        own = machine_facts(accelerator.device_name()) | dict(facts or {})
        require_agreement(meeting, own)
        doing.enter("joining the ranks")
    url = None if meeting is None else meeting.process_group_url()
    options = {} if patience is None else {"timeout": patience}
    deepspeed.init_distributed(accelerator.communication_backend_name(), init_method=url, verbose=False, **options)
    yield World(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        local_rank=local_rank,
        device=torch.device(accelerator.device_name(local_rank)),
    )
    # DeepSpeed's engine is a cycle that holds groups. A gloo group that outlives the interpreter aborts the process.
    gc.collect()
    deepspeed.comm.destroy_process_group()


def meet(purpose: str) -> Meeting:
    """Meets the other ranks; see `Meeting`.

    Raises: ConfigError if the launcher's environment is wrong; RunError if it is incomplete, or a rank does not come.
    """
    rank, size, _ = complete_environment(os.environ)
    if "MASTER_ADDR" not in os.environ:  # DeepSpeed would ask MPI for it later
        quiet_deepspeed().comm.mpi_discovery(MASTER_PORT.read(os.environ), verbose=False)
    return Meeting(purpose, rank=rank, size=size)


def configure_logging(world: World) -> None:
    """Sends evenpack's log to standard error: information from rank 0, warnings from every rank with its number."""
    if world.is_main:
        log_to_stderr()
    else:
        log_to_stderr(prefix=f"rank {world.rank}: ", level=logging.WARNING)


def require_shared_directory(directory: Path, world: World, *, patience_seconds: float = 15.0) -> None:
    """Makes `directory` and proves that all ranks see the same one, by a file that rank 0 writes and others read.

    Network file systems cache directories for some seconds: `patience_seconds` allows for it.

    Raises: RunError naming the machines that do not see it.
    """
    token = world.broadcast(uuid.uuid4().hex)
    proof = directory / ".seen_by_all"  # always the same, so that a kill leaves one at most
    world.on_main(lambda: _write_proof(proof, token))
    deadline = time.monotonic() + patience_seconds
    while not (seen := _has_proof(proof, token)) and time.monotonic() < deadline:
        time.sleep(0.1)
        with suppress(OSError):
            list(directory.iterdir())  # makes network file systems refresh
    reports = world.all_gather((seen, socket.gethostname()))
    if world.is_main:
        proof.unlink(missing_ok=True)
    blind = sorted({host for seen, host in reports if not seen})
    if blind:
        raise RunError(
            f"{', '.join(blind)} cannot see the files of {reports[0][1]} in run.output_dir ({directory.absolute()}): "
            "put it on a file system that all machines share"
        )


def _has_proof(proof: Path, token: str) -> bool:
    with suppress(OSError):
        return proof.read_text() == token
    return False


def _write_proof(proof: Path, token: str) -> None:
    with explained(proof.parent, action="written", then="run the same command again, or name another run.output_dir"):
        proof.parent.mkdir(parents=True, exist_ok=True)
        proof.write_text(token)


def complete_environment(environment: MutableMapping[str, str]) -> tuple[int, int, int]:
    """Fills in RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT from the launcher's environment.

    Under MPI over several machines MASTER_ADDR may be missing: DeepSpeed then gets it from mpi4py.

    Returns: rank, world size and local rank.
    Raises: ConfigError for a value that is wrong; RunError if there is only a part of a launcher's environment.
    """
    check_ranks(environment)
    for variable in (RANK, WORLD_SIZE, LOCAL_RANK):
        if (number := variable.read(environment)) is not None:
            environment.setdefault(variable.names[0], str(number))
    names = [variable.names[0] for variable in (RANK, WORLD_SIZE, LOCAL_RANK)]
    present = [name for name in names if name in environment]
    if not present:
        tasks = SLURM_TASKS.read(environment) or 1
        if tasks > 1:
            raise RunError(
                f"srun started {tasks} separate tasks: let srun start one task on each machine, "
                "and `deepspeed` or `torchrun` in it the ranks"
            )
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        environment.update(alone, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
        environment.pop(AGENT_STORE, None)  # torch would wait for a store that is not there
    elif len(present) < len(names):
        missing = ", ".join(sorted(set(names) - set(present)))
        raise RunError(
            f"the environment sets {', '.join(present)} but not {missing}: start with `deepspeed`, `torchrun` or "
            "`mpirun`, or unset them to run as a single process"
        )
    if "MASTER_ADDR" not in environment and _all_on_this_machine(environment):
        environment["MASTER_ADDR"] = "127.0.0.1"
    under_mpi = MPI_LOCAL_SIZE.found_in(environment) is not None
    if "MASTER_ADDR" not in environment and not (under_mpi and importlib.util.find_spec("mpi4py")):
        raise RunError(
            f"{environment['WORLD_SIZE']} ranks need the address of the first one: set MASTER_ADDR for each of them "
            "(mpirun -x MASTER_ADDR=...), or start with `mpirun` and evenpack[mpi] installed"
        )
    environment.setdefault("MASTER_PORT", _MPI_PORT)
    rank, size, local_rank = (int(environment[name]) for name in names)
    return rank, size, local_rank


def _all_on_this_machine(environment: Mapping[str, str]) -> bool:
    return (MPI_LOCAL_SIZE.read(environment) or 1) == WORLD_SIZE.read(environment)


def quiet_deepspeed() -> ModuleType:
    """Imports DeepSpeed (seconds) so that it logs only warnings, to standard error. Raises: ConfigError."""
    requested_accelerator(os.environ)
    if not torch.cuda.is_available():
        choose_cpu()  # otherwise each rank warns that it found no other
    import deepspeed

    if deepspeed.get_accelerator().device_name() == "cpu":
        # It would first compile a shared-memory collective, 40 s before the first step; and to learn whether it can, it
        # would call the C compiler for every other operation, too, if no answer were there.
        vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
    # DeepSpeed 0.19 still calls the old names under torch 2.13.
    old_names = "all_gather_into_tensor|reduce_scatter_tensor"
    warnings.filterwarnings("ignore", message=f".*({old_names}). is deprecated", category=FutureWarning)
    logger = logging.getLogger("DeepSpeed")
    logger.setLevel(logging.WARNING)
    logger.addFilter(_concerns_us)
    for handler in logger.handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream in (sys.stdout, sys.__stdout__):
            handler.setStream(sys.stderr)  # standard output belongs to --json
    return cast(ModuleType, deepspeed)


def _concerns_us(record: logging.LogRecord) -> bool:
    """Returns whether a warning of DeepSpeed's says anything of evenpack's models.

    ZeRO 3 warns of inputs that it does not look into: batches, in which no gradient flows.
    """
    return "unknown inputs or outputs type" not in str(record.msg)


def bind_to_cores_of(gpu: Any, *, pci_devices: Path = _PCI_DEVICES) -> frozenset[int] | None:
    """Keeps this process, and those that it starts from now on, on the cores of a GPU's NUMA node.

    A node of eight GPUs has two processors or more, each with its own memory and its own GPUs. A rank whose threads,
    loader and page-locked memory lie at the other processor copies through the link between them.

    It does nothing where the process is kept on some cores already (numactl, `--bind_cores_to_rank`, a container), or
    where all cores are the GPU's: a choice that was made stays.

    Args:
        gpu: what `torch.cuda.get_device_properties` returns, with the numbers of its place.

    Returns: the cores; None if it did nothing.
    """
    place: tuple[Any, ...] = tuple(getattr(gpu, f"pci_{part}_id", None) for part in ("domain", "bus", "device"))
    if None in place or not hasattr(os, "sched_setaffinity"):
        return None
    own = os.sched_getaffinity(0)
    with suppress(OSError, ValueError):  # a virtual machine may hide where a device is
        listed = (pci_devices / "{:04x}:{:02x}:{:02x}.0".format(*place) / "local_cpulist").read_text()
        beside = own & listed_cores(listed)
        if len(own) == os.cpu_count() and beside and beside != own:
            for thread in _THREADS.iterdir():
                with suppress(ProcessLookupError):  # it has ended
                    os.sched_setaffinity(int(thread.name), beside)
            return frozenset(beside)
    return None


def listed_cores(text: str) -> set[int]:
    """Returns the numbers of a list as Linux writes it, for example 0-3,8. Raises: ValueError."""
    ends = [part.partition("-") for part in text.strip().split(",") if part]
    return {core for first, _, last in ends for core in range(int(first), int(last or first) + 1)}
