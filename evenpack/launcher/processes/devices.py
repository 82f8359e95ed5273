"""The computing devices of this machine, and the memory of ranks on its CPU."""

import ctypes
import importlib.util
import os
import runpy
import sys
from pathlib import Path

from evenpack.launch_environment import requested_accelerator, settle_on_cpu


def cpu_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cuda_devices() -> int:
    """Returns the number of CUDA devices that this process may use; 0 without an import of a torch built without."""
    if "torch" not in sys.modules and not _is_torch_built_for_gpus():
        return 0
    import torch

    return torch.cuda.device_count()


def _is_torch_built_for_gpus() -> bool:
    """Returns what torch's generated file of its version says; importing torch takes a second. True if unknown."""
    found = importlib.util.find_spec("torch")
    path = None if found is None or found.origin is None else Path(found.origin).with_name("version.py")
    if path is None or not path.is_file():
        return True
    values = runpy.run_path(str(path))
    return any(values.get(name, "unknown") is not None for name in ("cuda", "hip"))


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


def settle_accelerator() -> None:
    """Tells DeepSpeed that there is only the CPU, if this is so; to be called before it is imported.

    Otherwise it would detect that itself, and report it on standard output, which is reserved for results.

    Raises: ConfigError for a DS_ACCELERATOR of another name.
    """
    requested_accelerator(os.environ)
    if cuda_devices() == 0:
        settle_on_cpu()
