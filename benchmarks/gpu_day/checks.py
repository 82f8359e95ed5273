"""Host waits and recompilations of real steps, and copies of batches to the device. Fails if a step waits or compiles
again.

    python benchmarks/gpu_day/checks.py RUN.yaml --out FILE.json [--steps N] [section.key=value ...]

On a CPU no wait can be seen (`waits` is null), and copies stay in its memory.
"""

import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.utils import counters

from evenpack.batch import PackedBatch
from evenpack.engine.world.distributed import World
from evenpack.files import write_json
from evenpack.studies.throughput.measure import micro_batches_of
from gpu_day.stepping import device_name, read_arguments, stepping, synchronise

_WARMUP = 3
_COPIES = 20
_PRODUCT = 4096
"""Rows of the product during which the side stream copies."""


def count_waits(world: World, step: Callable[[], object]) -> list[str] | None:
    """Returns where a step made the host wait, as torch's debug mode reports it; None on a CPU."""
    if world.device.type != "cuda":
        step()
        return None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return [f"{one.filename}:{one.lineno}" for one in caught if "called a synchronizing" in str(one.message)]


def time_copies(world: World, batch: PackedBatch) -> dict[str, float]:
    """Returns milliseconds of a copy: from pageable and pinned memory, and what one on a side stream adds to a
    product."""
    rows = _PRODUCT if world.device.type == "cuda" else 256
    factor = torch.randn(rows, rows, device=world.device, dtype=torch.bfloat16)

    def seconds(work: Callable[[], object]) -> float:
        work()
        synchronise(world)
        started = time.perf_counter()
        for _ in range(_COPIES):
            work()
        synchronise(world)
        return 1e3 * (time.perf_counter() - started) / _COPIES

    found = {"pageable": seconds(lambda: batch.to(world.device))}
    product = seconds(lambda: factor @ factor)
    if world.device.type != "cuda":
        return found | {"product": product}
    pinned, side = batch.pin_memory(), torch.cuda.Stream(world.device)  # type: ignore[no-untyped-call]

    def beside() -> None:
        with torch.cuda.stream(side):
            pinned.to(world.device, non_blocking=True)
        factor @ factor

    found["pinned"] = seconds(lambda: pinned.to(world.device, non_blocking=True))
    return found | {"product": product, "added_by_side_stream": seconds(beside) - product}


def main() -> int:
    """Returns 1 if a step waited or compiled again."""
    given = read_arguments(__doc__, steps=20)
    with stepping(given.config, "packed") as (timer, (packed,)):
        steps = [micro_batches_of(packed, number) for number in range(_WARMUP + given.steps)]
        for number in range(_WARMUP):
            timer.engine.train_step(number, steps[number])
        before = int(counters["stats"]["unique_graphs"])
        waits: list[list[str] | None] = []
        for number in range(_WARMUP, len(steps)):
            batches = steps[number]
            waits.append(count_waits(timer.world, lambda: timer.engine.train_step(number, batches)))  # noqa: B023
        value: dict[str, Any] = {
            "device": device_name(timer.world),
            "steps": given.steps,
            "waits": None if None in waits else sum(len(one or []) for one in waits),
            "wait_places": sorted({place for one in waits for place in one or []}),
            "graphs_before": before,
            "recompilations": int(counters["stats"]["unique_graphs"]) - before,
            "copy_milliseconds": time_copies(timer.world, steps[0][0]),
        }
    write_json(given.out, value)
    print(value)
    return 1 if value["waits"] or value["recompilations"] else 0


if __name__ == "__main__":
    sys.exit(main())
