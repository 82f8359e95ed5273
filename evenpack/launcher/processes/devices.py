"""What this machine has to compute with."""

import os


def cpu_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cuda_devices() -> int:
    """CUDA devices that this process may use."""
    import torch

    return torch.cuda.device_count()


def settle_accelerator() -> None:
    """Tells DeepSpeed that there is nothing but the CPU, where this is so; to be called before it is imported.

    It would else find out by itself, and say so on standard output, which belongs to results.
    """
    if cuda_devices() == 0:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
