"""Workers on many machines: the ranks that `mpirun -n N evenpack prepare RUN.yaml` starts."""

import os
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import cast

from evenpack.data.prepare.tokenising.workers import MpiWorkers
from evenpack.errors import ConfigError
from evenpack.launch_environment import MPI_LOCAL_SIZE, MPI_WORLD_SIZE


def started_ranks() -> int:
    """Returns the number of MPI ranks of which this process is one; 1 without MPI. Raises: ConfigError."""
    return MPI_WORLD_SIZE.read(os.environ) or 1


@contextmanager
def mpi_workers() -> Iterator[MpiWorkers | None]:
    """Yields all other ranks as workers in rank 0; the others work until it leaves its block, and then get None.

    Raises: ConfigError if mpi4py, or the MPI library that it needs, is missing.
    """
    try:
        from mpi4py import MPI
        from mpi4py.futures import MPICommExecutor
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"started as one of {started_ranks()} MPI ranks, but mpi4py cannot be imported ({error}): install "
            "evenpack[mpi], or mpi4py for the MPI of this cluster, on every host; or start without mpirun and use "
            "--workers"
        ) from error
    os.environ.setdefault("RAYON_NUM_THREADS", str(_cores_of_a_rank()))
    ranks = MPI.COMM_WORLD.Get_size()
    if ranks != started_ranks():
        raise ConfigError(
            f"mpirun has started {started_ranks()} ranks, but mpi4py sees {ranks}: it was built for another MPI than "
            "that of this mpirun; install mpi4py for it, or use the mpirun of evenpack[mpi]"
        )
    with MPICommExecutor(MPI.COMM_WORLD, root=0) as entered:
        executor = cast("Executor | None", entered)  # its stub names another class
        yield None if executor is None else MpiWorkers(executor, ranks - 1)


def _cores_of_a_rank() -> int:
    """Returns the cores to which it is bound, or its part of the machine's."""
    allowed = len(os.sched_getaffinity(0))
    return allowed if allowed < (os.cpu_count() or 1) else max(1, allowed // (MPI_LOCAL_SIZE.read(os.environ) or 1))
