"""Measures the time from lengths to a plan, from a plan to a step, and to the first batch anywhere in an epoch.

    python benchmarks/plan.py [--name wikipedia_512] [--json]

Times are CPU seconds, medians. Each part runs in a process of its own, so that its peak of memory is its own.

- lengths to plan: histogram, sort, packing and PackPlan of a memory-mapped file of lengths, compared with numpy's
  stable argsort of the same lengths.
- step: 65,536 packs drawn in one call and assigned to 64 ranks, compared with drawing them pack by pack.
- first batch: a plan opened and 64 packs drawn at 0 % and at 99 % of an epoch of 1e9 packs; the index of sequences is a
  sparse file of its true size.
"""

import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import measuring
import numpy as np

from evenpack.data.order.balance import assign_by_cost
from evenpack.data.order.plan import PackPlan, sort_by_length
from evenpack.data.packing import LengthHistogram, pack
from evenpack.studies.lengths.reading import published_histogram, published_names

Figures = dict[str, float | int | str]

STEP_PACKS = 65_536
RANKS = 64
EPOCH_PACKS = 10**9
BATCH_PACKS = 64


def main() -> None:
    parser = measuring.parser_of(__doc__)
    parser.add_argument("--name", choices=published_names(), default="wikipedia_512", help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    histogram = published_histogram(arguments.name)
    report: Figures = {"histogram": arguments.name, "sequences": histogram.sequences}
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "lengths.npy"
        measuring.in_own_process(write_lengths, file, histogram)
        report |= measuring.in_own_process(lengths_to_plan, file, len(histogram.counts))
        report |= measuring.in_own_process(argsort_alone, file)
        ratio = float(report["argsort_seconds"]) / float(report["lengths_to_plan_seconds"])
        report["argsort_to_lengths_to_plan"] = round(ratio, 2)
        report |= measuring.in_own_process(plan_steps, histogram)
        report |= measuring.in_own_process(first_batches, Path(directory) / "index", histogram)
    measuring.print_report(report, as_json=arguments.json)


def write_lengths(file: Path, histogram: LengthHistogram) -> Figures:
    lengths = np.repeat(np.arange(1, len(histogram.counts) + 1, dtype=np.int32), histogram.counts)
    np.random.default_rng(0).shuffle(lengths)
    np.save(file, lengths)
    return {}


def lengths_to_plan(file: Path, longest: int) -> Figures:
    stages: dict[str, list[float]] = {"histogram": [], "sort": [], "packing": [], "plan": []}
    before = peak_megabytes()
    for _ in range(3):
        lengths = np.load(file, mmap_mode="r")
        times = [time.process_time()]
        histogram = LengthHistogram.from_lengths(lengths, longest=longest)
        times.append(time.process_time())
        sequence_ids = sort_by_length(lengths, histogram)
        times.append(time.process_time())
        packing = pack(histogram, pack_length=longest)
        times.append(time.process_time())
        PackPlan(packing, sequence_ids, key=1)
        times.append(time.process_time())
        for stage, seconds in zip(stages.values(), np.diff(times).tolist(), strict=True):
            stage.append(seconds)
        del sequence_ids
    medians = {f"{name}_seconds": round(statistics.median(times), 4) for name, times in stages.items()}
    return {
        **medians,
        "lengths_to_plan_seconds": round(sum(medians.values()), 3),
        "peak_megabytes": round(peak_megabytes()),
        "peak_megabytes_before": round(before),
    }


def argsort_alone(file: Path) -> Figures:
    lengths = np.load(file)
    return {"argsort_seconds": round(median_cpu_seconds(lambda: np.argsort(lengths, kind="stable"), 3), 3)}


def plan_steps(histogram: LengthHistogram) -> Figures:
    packing = pack(histogram, pack_length=len(histogram.counts))
    sequence_ids = np.arange(histogram.sequences, dtype=np.int32)
    plan = PackPlan(packing, sequence_ids, key=1)
    draws, assigns = [], []
    for step in range(11):
        start = time.process_time()
        drawn = plan.draw(np.arange(step * STEP_PACKS, (step + 1) * STEP_PACKS))
        costs = np.add.reduceat(drawn.lengths**2, drawn.offsets[:-1]).astype(np.float64)
        drawn_at = time.process_time()
        assign_by_cost(costs, ranks=RANKS, micro_batches=1, per_micro_batch=False)
        draws.append(drawn_at - start)
        assigns.append(time.process_time() - drawn_at)
    alone = [median_cpu_seconds(partial(plan.draw, np.array([place])), 3) for place in range(100)]
    together = statistics.median(draws)
    return {
        "step_draw_seconds": round(together, 4),
        "step_assign_seconds": round(statistics.median(assigns), 4),
        "step_seconds": round(statistics.median(np.add(draws, assigns).tolist()), 4),
        "pack_by_pack_to_bulk_draw": round(statistics.mean(alone) * STEP_PACKS / together),
    }


def first_batches(file: Path, histogram: LengthHistogram) -> Figures:
    """Draws at 0 % and 99 % in turn, each time packs that were not drawn before."""
    packs = pack(histogram, pack_length=len(histogram.counts)).packs
    scaled = LengthHistogram(counts=histogram.counts * -(-EPOCH_PACKS // packs))
    packing = pack(scaled, pack_length=len(scaled.counts))
    dtype = np.dtype(np.int32 if scaled.sequences < 1 << 31 else np.int64)
    with file.open("wb") as sparse:
        sparse.truncate(scaled.sequences * dtype.itemsize)
    starts = {"at_0_percent": 0, "at_99_percent": packing.packs * 99 // 100}
    times: dict[str, list[float]] = {name: [] for name in starts}
    for repeat in range(101):
        for name, first in starts.items():
            start = time.process_time()
            index = np.memmap(file, dtype=dtype, mode="r")
            PackPlan(packing, index, key=1).draw(np.arange(BATCH_PACKS) + first + repeat * BATCH_PACKS)
            times[name].append(time.process_time() - start)
    at_start, at_end = (statistics.median(measured) for measured in times.values())
    return {
        "epoch_packs": packing.packs,
        "first_batch_at_0_percent_milliseconds": round(at_start * 1e3, 3),
        "first_batch_at_99_percent_milliseconds": round(at_end * 1e3, 3),
        "first_batch_99_to_0_percent": round(at_end / at_start, 3),
    }


def median_cpu_seconds(work: Callable[[], object], repeats: int) -> float:
    """Returns the median of the CPU seconds of this process."""
    times = []
    for _ in range(repeats):
        started = time.process_time()
        work()
        times.append(time.process_time() - started)
    return statistics.median(times)


def peak_megabytes() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1e6 if sys.platform == "darwin" else 1e3)  # bytes there, KB on Linux


if __name__ == "__main__":
    main()
