"""The cores of the NUMA node of a rank's GPU, by Linux's files under /sys.

A node of eight GPUs has two processors or more, each with its own memory and its own GPUs. A rank whose threads, loader
and page-locked memory lie at the other processor copies through the link between them.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

_PCI_DEVICES = Path("/sys/bus/pci/devices")
_THREADS = Path("/proc/self/task")


def bind_to_cores_of(gpu: Any, *, pci_devices: Path = _PCI_DEVICES) -> frozenset[int] | None:
    """Keeps this process, and those that it starts from now on, on the cores of a GPU's NUMA node.

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
