"""Measures what it costs a rank to be watched: the word on what it begins to do, and the looks of its guard.

    python benchmarks/watching.py [--ranks 8] [--looks 500] [--json FILE]

`enter` is what the training loop calls, some ten times a step. A look is what the guard's thread does twice a second:
it writes heartbeats when they are due, and reads statuses, failures and stop requests of a run with so many ranks on
this machine. CPU time, in one process; the other ranks are processes that sleep, and the files lie on a local disk.
"""

import os
import subprocess
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import measuring

from evenpack.engine.activity import doing
from evenpack.launcher.processes.guard import LOOK_SECONDS, Ancestors, Guard, WatchedRun
from evenpack.launcher.processes.hangs import HangLimits, Heartbeat
from evenpack.launcher.processes.identities import ProcessIdentity, RankPlace
from evenpack.launcher.processes.ranks import RankFolder, RankStatus
from evenpack.launcher.processes.stop import StopFlag

_ENTERS = 200_000
_TIMEOUT_SECONDS = 900.0


def main() -> None:
    parser = measuring.parser_of(__doc__, json_file=True)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--looks", type=int, default=500)
    arguments = parser.parse_args()
    sleepers = [subprocess.Popen(["sleep", "600"]) for _ in range(arguments.ranks - 1)]
    try:
        with tempfile.TemporaryDirectory() as output_dir:
            found = measure(Path(output_dir), [os.getpid(), *(one.pid for one in sleepers)], looks=arguments.looks)
    finally:
        for one in sleepers:
            one.kill()
    for name, value in found.items():
        print(f"{name:28} {value:10.4f}")
    measuring.write_report(found, arguments.json)


def measure(output_dir: Path, pids: list[int], *, looks: int) -> dict[str, float]:
    """Returns microseconds of an `enter` and of a look, and the share of a core that looks take."""
    folder = RankFolder(output_dir, "run")
    folder.path.mkdir()
    places = [_place(rank, len(pids)) for rank in range(len(pids))]
    for place, pid in zip(places, pids, strict=True):
        process = ProcessIdentity.of(pid)
        assert process is not None, "it has just been started"
        folder.write_status(replace(RankStatus.starting("run", place), process=process))
    limits = HangLimits(step_seconds=_TIMEOUT_SECONDS, start_seconds=_TIMEOUT_SECONDS)
    heartbeat = Heartbeat(folder, RankStatus.starting("run", places[0]), limits=limits)
    stop = StopFlag()
    guard = Guard(places[0], Ancestors(), stop)
    guard.watch(WatchedRun(places[0], folder=folder, token=None, stop=stop, heartbeat=heartbeat, limits=limits))
    guard.look()  # the first one imports and identifies
    began = time.thread_time()
    for _ in range(looks):
        guard.look()
    look = (time.thread_time() - began) / looks
    began = time.thread_time()
    for step in range(_ENTERS):
        doing.enter("computing gradients", step)
    enter = (time.thread_time() - began) / _ENTERS
    return {
        "microseconds of enter": 1e6 * enter,
        "microseconds of a look": 1e6 * look,
        "percent of a core": 100 * look / LOOK_SECONDS,
    }


def _place(rank: int, ranks: int) -> RankPlace:
    numbers = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
    return RankPlace.of_environment({name: str(number) for name, number in numbers.items()})


if __name__ == "__main__":
    main()
