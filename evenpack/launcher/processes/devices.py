"""The computing devices of this machine, and the memory of ranks on its CPU."""

import ctypes
import importlib.util
import logging
import os
import re
import runpy
import socket
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenpack.errors import ConfigError
from evenpack.launch_environment import LOCAL_RANK, choose_cpu, requested_accelerator

if TYPE_CHECKING:
    from evenpack.engine.config import RunConfig

log = logging.getLogger(__name__)

_DEVICE_FILES = Path("/dev")


def cpu_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cuda_devices() -> int:
    """Returns the number of CUDA devices that this process may use; 0 without an import of a torch built without."""
    build = _build_of_torch()
    if "torch" not in sys.modules and all(build.get(name, "unknown") is None for name in ("cuda", "hip")):
        return 0
    import torch

    return torch.cuda.device_count()


def _build_of_torch() -> Mapping[str, Any]:
    """Returns what torch's generated file of its version holds, since importing torch takes a second."""
    found = importlib.util.find_spec("torch")
    path = None if found is None or found.origin is None else Path(found.origin).with_name("version.py")
    return {} if path is None or not path.is_file() else runpy.run_path(str(path))


def visible_devices(count: int) -> list[str]:
    """Returns the first `count` CUDA devices as CUDA_VISIBLE_DEVICES names them, else their numbers."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    return [name.strip() for name in named.split(",")[:count]]


def require_seen_gpus(config: "RunConfig", environment: Mapping[str, str]) -> None:
    """Warns if a run would train on the CPU of a machine with NVIDIA GPUs, of which PyTorch sees none.

    Not if the CPU is asked for (DS_ACCELERATOR=cpu), or no GPU shall be seen (CUDA_VISIBLE_DEVICES).

    Raises: ConfigError instead, for a run that is not to be slow on a GPU (`attention.on_slow_backend: error`).
    """
    files = sorted(path.name for path in _DEVICE_FILES.glob("nvidia[0-9]*"))
    is_hidden = re.match(r"\s*(\d|GPU-|MIG-)", environment.get("CUDA_VISIBLE_DEVICES", "0")) is None
    if not files or is_hidden or requested_accelerator(environment) == "cpu" or cuda_devices():
        return
    build = _build_of_torch()
    found = (
        f"PyTorch sees none of the NVIDIA devices of {socket.gethostname()} ({', '.join(files)}): it is torch "
        f"{build.get('__version__')}, built for CUDA {build.get('cuda')} (None: for the CPU alone); compare what "
        "nvidia-smi shows with docs/gpu.md"
    )
    if config.attention.on_slow_backend == "error":
        raise ConfigError(
            f"{found}. The run file is for GPUs (attention.on_slow_backend: error); to train on the CPU nevertheless "
            "set DS_ACCELERATOR=cpu"
        )
    if LOCAL_RANK.read(environment) in (None, 0):
        log.warning("%s; the run trains on the CPU", found)


_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables of PyTorch's allocator for GPUs; the second is an older name."""


def configure_allocator(config: "RunConfig", environment: MutableMapping[str, str]) -> None:
    """Lets the memory of a GPU grow in place where micro-batches differ in size; to be called before torch is imported.

    Otherwise each new size may leave a gap that no other one fills. Nothing is changed that the user has set, nor for a
    part of a GPU, which may lack the virtual memory for it.
    """
    is_part = environment.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-")
    if config.training.has_varying_slots and not is_part and not any(name in environment for name in _ALLOCATOR):
        environment[_ALLOCATOR[0]] = "expandable_segments:True"


_KEPT_MEMORY = {"MALLOC_MMAP_MAX_": (-4, 0), "MALLOC_TRIM_THRESHOLD_": (-1, 2**31 - 1)}
"""Environment variables of glibc, and what `mallopt` sets instead: M_MMAP_MAX and M_TRIM_THRESHOLD."""


def keep_freed_memory() -> bool:
    """Makes this process keep the memory that it frees, for the next buffer; returns whether it does.

    glibc maps each buffer of a step (logits, activations) newly from the kernel and gives it back, so that the kernel
    clears all their pages in every step: a seventh of the time of a small model on a CPU. The process stays as large as
    its largest step, plus what does not fit into gaps: 4 to 9 % (2,048 tokens, 4,096 and 30,522 entries). Nothing is
    changed where the C library is another one, or where the user has set one of these variables of glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name in os.environ for name in (*_KEPT_MEMORY, "GLIBC_TUNABLES")):
        return False
    return all(mallopt(option, value) == 1 for option, value in _KEPT_MEMORY.values())


def choose_accelerator() -> None:
    """Tells DeepSpeed that there is only the CPU, if this is so; to be called before it is imported.

    Otherwise it would detect that itself, and report it on standard output, which is reserved for results.

    Raises: ConfigError for a DS_ACCELERATOR of another name.
    """
    requested_accelerator(os.environ)
    if cuda_devices() == 0:
        choose_cpu()


def settle_device() -> None:
    """Chooses the accelerator, and on a CPU keeps freed memory, for steps of training and of studies alike.

    Raises: as `choose_accelerator`.
    """
    choose_accelerator()
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        keep_freed_memory()
