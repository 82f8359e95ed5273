"""What the process says that has started a rank, if it is DeepSpeed's: `python -m deepspeed.launcher.launch`."""

import base64
import binascii
import json
import os
from collections.abc import Sequence
from contextlib import suppress

import psutil

_MODULE = "deepspeed.launcher.launch"


def parent_command() -> list[str]:
    """Returns the command line of this process's parent; empty if it cannot be read."""
    with suppress(psutil.Error):
        return list(psutil.Process(os.getppid()).cmdline())
    return []


def is_deepspeed_launcher(command: Sequence[str]) -> bool:
    """Returns whether a command starts the ranks of one machine for `deepspeed`."""
    return _MODULE in command


def first_rank_of_machine(command: Sequence[str], machine: int) -> int | None:
    """Returns the lowest rank of a machine, by its number in the hostfile; None if the command does not say it.

    It cannot be computed from LOCAL_RANK: DeepSpeed 0.19 sets it to the rank modulo the ranks of the machine, which
    begins with another number than 0 where machines have unequal slots.
    """
    if not is_deepspeed_launcher(command):
        return None
    for word in command:
        option, _, value = word.partition("=")
        if option == "--world_info":
            with suppress(binascii.Error, ValueError, TypeError, AttributeError):
                slots = [len(devices) for devices in json.loads(base64.urlsafe_b64decode(value)).values()]
                return sum(slots[:machine])
    return None
