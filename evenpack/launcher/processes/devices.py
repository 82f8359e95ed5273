"""The computing devices of this machine."""

import os


def cpu_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cuda_devices() -> int:
    """Returns the number of CUDA devices that this process may use."""
    import torch

    return torch.cuda.device_count()


def settle_accelerator() -> None:
    """Tells DeepSpeed that there is only the CPU, if this is so; to be called before it is imported.

    Otherwise it would detect that itself, and report it on standard output, which is reserved for results.
    """
    if cuda_devices() == 0:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
