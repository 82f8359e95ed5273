"""What the benchmarks share: their options, the lengths that they pack, clocks, processes of their own, and reports.

torch is imported only where it is needed, because some of them measure memory.
"""

import argparse
import json
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from evenpack.files import write_json

if TYPE_CHECKING:
    from evenpack.engine.world.distributed import World

ResultT = TypeVar("ResultT")


def parser_of(doc: str | None, *, run_file: bool = False, json_file: bool = False) -> argparse.ArgumentParser:
    """Returns a parser with the script's docstring as its help.

    Args:
        run_file: whether a run file and overrides come first.
        json_file: whether the report can be written to a file.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if run_file:
        parser.add_argument("run_file", type=Path)
        parser.add_argument("overrides", nargs="*", help="section.key=value")
    if json_file:
        parser.add_argument("--json", type=Path, help="also write the report to this file")
    return parser


def write_report(report: Any, path: Path | None) -> None:
    """Writes a report as JSON, atomically, if `path` is given."""
    if path is not None:
        write_json(path, report)


def print_report(report: dict[str, float | int | str], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(report, indent=2))
        return
    width = max(map(len, report))
    for name, value in report.items():
        print(
            f"{name.replace('_', ' '):<{width}}  {value:,}"
            if not isinstance(value, str)
            else f"{name:<{width}}  {value}"
        )


def lone_cpu() -> "World":
    """Returns the one rank of a run on the CPU, without a process group."""
    import torch

    from evenpack.engine.world.distributed import World

    return World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))


def status_kib(name: str, process: str = "self") -> int:
    """Returns a figure of /proc/PROCESS/status, such as RssAnon or VmHWM, in KiB; 0 where the system reports none."""
    status = Path("/proc", process, "status")
    lines = status.read_text().splitlines() if status.exists() else []
    return sum(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def drop_pages(*files: Path) -> None:
    """Drops the pages of files from memory, if the system can, so that the disk is read next."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def in_own_process(function: Callable[..., ResultT], *arguments: object) -> ResultT:
    """Calls a function in a new process, whose memory and heap are its own."""
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as executor:
        return executor.submit(function, *arguments).result()
