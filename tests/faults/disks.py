"""Small disks, and how they are filled."""

import os
import subprocess
from contextlib import suppress
from pathlib import Path


def small_disk(folder: Path, *, megabytes: int) -> bool:
    """Mounts an empty disk of that size at `folder`; returns False where that is not allowed."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    return subprocess.run(mount, capture_output=True, check=False).returncode == 0


def remove_small_disk(folder: Path) -> None:
    """Takes the disk away, with all that is on it."""
    if os.path.ismount(folder):
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(ballast: Path, *, left_bytes: int) -> None:
    """Fills the disk of a file but for some bytes."""
    block = bytes(65_536)
    with suppress(OSError), ballast.open("wb", buffering=0) as file:
        while file.write(block) == len(block):
            pass
        file.write(block)
    with ballast.open("r+b") as file:
        file.truncate(max(0, ballast.stat().st_size - left_bytes))
