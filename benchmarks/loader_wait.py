"""Measures the share of its time that a rank would wait for its loader, with a sleep in place of the device's work.

    python benchmarks/loader_wait.py RUN.yaml [section.key=value ...] --tokens-per-second 500000

Run `evenpack prepare` with the same arguments first. Loader processes make the batches of one rank as in training; each
step sleeps for as long as a device of that rate would compute its real tokens. A thread takes the batches from the
processes, as the one does that page-locks their memory in a run on a GPU; `--fetch rank` lets the rank take them, as
in a run on a CPU. Steps before `--warmup` fill the queues and do not count. `loader_cpu_seconds` are those of the
loader's processes, start included; `fetch_cpu_share` is the share of the time in which the rank was busy with it.
"""

import argparse
import json
import os
import queue
import resource
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import measuring

from evenpack.config import load_run_file
from evenpack.data.batches.pipeline import StepBatches, training_batches
from evenpack.engine.config import RunConfig
from evenpack.engine.resolving.resolve import open_run

QUEUED_STEPS = 4


def main() -> None:
    parser = measuring.parser_of(__doc__, run_file=True)
    parser.add_argument("--tokens-per-second", type=float, default=500_000.0, help="real tokens, on this rank")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--fetch", choices=("thread", "rank"), default="thread")
    arguments = parser.parse_intermixed_args()
    config = load_run_file(arguments.run_file, RunConfig, arguments.overrides)
    print(json.dumps(measure(config, arguments), indent=2))


def measure(config: RunConfig, arguments: argparse.Namespace) -> dict[str, Any]:
    run = open_run(config)
    steps = arguments.warmup + arguments.steps
    settings = replace(run.pipeline_settings(measuring.lone_cpu()), loader_workers=arguments.workers)
    waits, slept, fetching = [], 0.0, 0.0
    tokens = targets = 0
    load_before = os.getloadavg()[0]
    batches = training_batches(run.prepared, settings, start_step=0, stop_step=steps)
    fetched = by_thread(batches, at_most=QUEUED_STEPS) if arguments.fetch == "thread" else batches
    for number, (step, wait, cpu) in enumerate(timed(fetched)):
        started = time.perf_counter()
        time.sleep(step.counts.tokens / arguments.tokens_per_second)
        if number >= arguments.warmup:
            waits.append(wait)
            fetching += cpu
            slept += time.perf_counter() - started
            tokens += step.counts.tokens
            targets += step.counts.targets
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    loader_cpu = usage.ru_utime + usage.ru_stime
    return {
        "run": config.run.name,
        "model": config.model.kind,
        "pack_length": config.data.pack_length,
        "packs_per_micro_batch": config.training.items_per_micro_batch,
        "micro_batches": settings.micro_batches,
        "workers": arguments.workers,
        "fetch": arguments.fetch,
        "asked_tokens_per_second": arguments.tokens_per_second,
        "steps": arguments.steps,
        "tokens": tokens,
        "targets": targets,
        "tokens_per_second": round(tokens / (sum(waits) + slept)),
        "wait_share": round(sum(waits) / (sum(waits) + slept), 5),
        "fetch_cpu_share": round(fetching / (sum(waits) + slept), 5),
        "median_wait_seconds": round(statistics.median(waits), 5),
        "longest_wait_seconds": round(max(waits), 4),
        "loader_cpu_seconds": round(loader_cpu, 2),
        "load_average": [round(load_before, 1), round(os.getloadavg()[0], 1)],
    }


def by_thread(batches: Iterator[Any], *, at_most: int) -> Iterator[Any]:
    """Yields the batches, taken from the loader by a thread that is up to `at_most` steps ahead."""
    taken: queue.Queue[Any] = queue.Queue(at_most)

    def take() -> None:
        for step in batches:
            taken.put(step)
        taken.put(None)

    threading.Thread(target=take, daemon=True).start()
    yield from iter(taken.get, None)


def timed(batches: Iterator[Any]) -> Iterator[tuple[StepBatches, float, float]]:
    """Yields each step, the seconds that the rank waited for it, and those that its thread computed meanwhile."""
    started, before = time.perf_counter(), time.thread_time()
    for step in batches:
        yield step, time.perf_counter() - started, time.thread_time() - before
        started, before = time.perf_counter(), time.thread_time()


if __name__ == "__main__":
    main()
