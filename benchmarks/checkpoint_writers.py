"""Measures how much a step is slowed by who writes a checkpoint: a thread, one of lower priority, or a forked process.

    OMP_NUM_THREADS=1 python benchmarks/checkpoint_writers.py [--rounds 5] [--megabytes 560] [--folder DIR] [--json F]

Each round takes the same step four times: while nothing is written, and while each of the three writes, flushes and
checksums the same tensors. On a machine that others use too, only the four of one round compare.
"""

import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import measuring
import torch
from torch import Tensor, nn

from evenpack.files import file_checksum, fsync_file

WAYS = ("nothing", "thread", "process", "thread of lower priority")
_TENSORS = 200


def main() -> None:
    parser = measuring.parser_of(__doc__, json_file=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=560)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk that is to be measured")
    arguments = parser.parse_args()
    state = {str(index): torch.randn(arguments.megabytes * 250_000 // _TENSORS) for index in range(_TENSORS)}
    take_step = step_of_six_layers()
    take_step()
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for _ in range(arguments.rounds):
            for way in WAYS:
                seconds[way].append(timed(way, take_step, state, Path(folder) / "state.pt"))
    for way, values in seconds.items():
        print(f"{way:26} {statistics.median(values):6.2f} s  ({min(values):.2f} to {max(values):.2f})")
    report = {"seconds": seconds, "megabytes": arguments.megabytes, "load_average": os.getloadavg()}
    measuring.write_report(report, arguments.json)


def step_of_six_layers() -> Callable[[], None]:
    """Returns a function that makes two updates of six encoder layers of width 512 over 256 slots."""
    model = nn.Sequential(*(nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True) for _ in range(6)))
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = torch.randn(1, 256, 512)

    def take_step() -> None:
        for _ in range(2):
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return take_step


def timed(way: str, take_step: Callable[[], None], state: dict[str, Tensor], path: Path) -> float:
    """Returns the seconds of a step during which `way` writes; waits for the writer afterwards."""
    wait: Callable[[], Any] = lambda: None  # noqa: E731
    if way == "process":
        child = os.fork()
        if child == 0:
            write(state, path)
            os._exit(0)
        wait = lambda: os.waitpid(child, 0)  # noqa: E731
    elif way.startswith("thread"):
        thread = threading.Thread(target=write, args=(state, path), kwargs={"niceness": 10 * (way != "thread")})
        thread.start()
        wait = thread.join
    started = time.perf_counter()
    take_step()
    seconds = time.perf_counter() - started
    wait()
    return seconds


def write(state: dict[str, Tensor], path: Path, *, niceness: int = 0) -> None:
    """Writes, flushes and checksums, as a save does."""
    if niceness:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
    torch.save(state, path)
    fsync_file(path)
    file_checksum(path)


if __name__ == "__main__":
    main()
