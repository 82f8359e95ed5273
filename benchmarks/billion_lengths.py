"""Measures whether time is linear and memory bounded from a list of up to a billion lengths to a step of its plan.

    python benchmarks/billion_lengths.py [--name wikipedia_512] [--sequences 1e7 1e8 1e9] [--directory DIR]

Lengths are drawn, with replacement, from the sequences of a published histogram into a memory-mapped .npy file of
uint16. Then a process for each number of sequences computes histogram, packing, sorted index (a mapped file too),
PackPlan of that file, the first step and one at 99 % of the second epoch.

Times are CPU seconds of that process (user and system) in one run, with the wall time; they exclude the kernel's
threads that write pages to the disk. Memory is sampled by another process every 10 ms (Linux): anonymous memory belongs
to the process alone; pages of the mapped files are counted as resident too, but the system can reclaim them.
"""

import json
import resource
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import measuring
import numpy as np

from evenpack.data.order.plan import PackPlan, sort_by_length
from evenpack.data.packing import LengthHistogram, pack
from evenpack.data.permutation import sequence_id_type
from evenpack.data.tokens.array_file import mapped_array
from evenpack.studies.lengths.reading import published_histogram, published_names

Figures = dict[str, Any]
ResultT = TypeVar("ResultT")

STEP_PACKS = 65_536
CHUNK = 1 << 22
SAMPLE_SECONDS = 0.01


def main() -> None:
    parser = measuring.parser_of(__doc__)
    parser.add_argument("--name", choices=published_names(), default="wikipedia_512", help="default: %(default)s")
    parser.add_argument("--sequences", type=float, nargs="+", default=[1e7, 1e8, 1e9], help="default: 1e7 1e8 1e9")
    parser.add_argument("--directory", type=Path, help="for the files, 6 bytes a sequence; default: the temporary one")
    arguments = parser.parse_args()
    runs = [measure(arguments.name, int(sequences), arguments.directory) for sequences in arguments.sequences]
    per_million = [run["histogram_and_sort_cpu_seconds_per_million"] for run in runs]
    report = {
        "histogram": arguments.name,
        "runs": runs,
        "histogram_and_sort_per_million_over_the_run_before": [
            round(after / before, 3) for before, after in pairwise(per_million)
        ],
    }
    print(json.dumps(report, indent=2))


def measure(name: str, sequences: int, directory: Path | None) -> Figures:
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        file = Path(folder) / "lengths.npy"
        write_lengths(file, published_histogram(name), sequences)
        return {"sequences": sequences, **watched(lengths_to_steps, file, len(published_histogram(name).counts))}


def write_lengths(file: Path, histogram: LengthHistogram, sequences: int) -> None:
    population = np.repeat(np.arange(1, len(histogram.counts) + 1, dtype=np.uint16), histogram.counts)
    generator = np.random.default_rng(0)
    with mapped_array(file, sequences, population.dtype) as lengths:
        for start in range(0, sequences, CHUNK):
            chunk = lengths[start : start + CHUNK]
            chunk[:] = population[generator.integers(0, len(population), len(chunk), dtype=np.uint32)]


def lengths_to_steps(file: Path, longest: int) -> Figures:
    before = anonymous_megabytes()
    times = Times()
    lengths = np.load(file, mmap_mode="r")
    index = file.with_name("sorted_sequences.npy")
    histogram = times.of("histogram", lambda: LengthHistogram.from_lengths(lengths, longest=longest))
    packing = times.of("packing", lambda: pack(histogram, pack_length=longest))
    times.of("sort", lambda: sort_to_file(lengths, histogram, index))
    plan = times.of("plan", lambda: PackPlan(packing, np.load(index, mmap_mode="r"), key=1))
    total = sum(times.cpu_seconds.values())
    growing = times.cpu_seconds["histogram"] + times.cpu_seconds["sort"]
    for part, first in {"first_step": 0, "far_step": plan.packs + plan.packs * 99 // 100}.items():
        positions = np.arange(first, first + STEP_PACKS)
        drawn = times.of(part, partial(plan.draw, positions))
        np.testing.assert_array_equal(drawn.lengths, lengths[drawn.sequence_ids])
    return {
        "algorithm": packing.algorithm,
        "packs": plan.packs,
        "cpu_seconds": times.cpu_seconds,
        "wall_seconds": times.wall_seconds,
        "lengths_to_plan_cpu_seconds": round(total, 3),
        "histogram_and_sort_cpu_seconds_per_million": round(growing / len(lengths) * 1e6, 5),
        "mapped_lengths_megabytes": round(file.stat().st_size / 1e6),
        "mapped_index_megabytes": round(index.stat().st_size / 1e6),
        "anonymous_megabytes_before": before,
        "peak_resident_megabytes": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3),
    }


def sort_to_file(lengths: np.ndarray, histogram: LengthHistogram, index: Path) -> None:
    with mapped_array(index, len(lengths), sequence_id_type(len(lengths))) as sequence_ids:
        sort_by_length(lengths, histogram, out=sequence_ids)


class Times:
    """Returns the time and memory of each part."""

    def __init__(self) -> None:
        self.cpu_seconds: dict[str, float] = {}
        self.wall_seconds: dict[str, float] = {}

    def of(self, part: str, function: Callable[[], ResultT]) -> ResultT:
        cpu, wall = time.process_time(), time.perf_counter()
        result = function()
        self.cpu_seconds[part] = round(time.process_time() - cpu, 4)
        self.wall_seconds[part] = round(time.perf_counter() - wall, 4)
        return result


def watched(function: Callable[..., Figures], *arguments: object) -> Figures:
    """Calls `function` in a new process; returns its figures with the process's peak of anonymous memory."""
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=send_figures, args=(sender, function, *arguments))
    process.start()
    sender.close()
    peak = 0
    while not receiver.poll(SAMPLE_SECONDS):
        peak = max(peak, anonymous_megabytes(str(process.pid)))
    figures: Figures = receiver.recv()
    process.join()
    return figures | {"peak_anonymous_megabytes": peak}


def send_figures(sender: Connection, function: Callable[..., Figures], *arguments: object) -> None:
    sender.send(function(*arguments))


def anonymous_megabytes(process: str = "self") -> int:
    return measuring.status_kib("RssAnon", process) * 1024 // 10**6


if __name__ == "__main__":
    main()
