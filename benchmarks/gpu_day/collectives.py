"""Bandwidth of all-reduce, reduce-scatter and all-gather over the ranks that a launcher started, and whether they are
right.

    python benchmarks/gpu_day/ranks.py RANKS benchmarks/gpu_day/collectives.py --out FILE.json [--tiny]

Algorithm bandwidth is the bytes of the whole vector (FP32) over the seconds of one collective on the slowest rank. Bus
bandwidth is what each link of a ring carries, to be compared with the bandwidth of the links: by the factors of
nccl-tests 2 (n - 1) / n of the algorithm bandwidth for all-reduce, (n - 1) / n for the others.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from evenpack.engine.world.distributed import World, joined_world
from evenpack.files import write_json
from evenpack.launcher.processes.devices import choose_accelerator
from gpu_day.stepping import synchronise

MEGABYTES = (1, 16, 256, 1024)
"""Sizes of the whole vector, from a small model's gradients to nearly those of BERT-large."""
_TINY_MEGABYTES = (1, 2)
_WARMUP = 3


@dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective over buffers of its own."""

    name: str
    run: Callable[[], object]
    given: Tensor
    """What this rank gives; rank r is to fill it with r + 1 for `ones`."""
    ones: Callable[[], Tensor]
    """Returns numbers that are 1 where the result is right."""
    bus_factor: float


def collectives(world: World, values: int) -> tuple[Collective, ...]:
    """Returns each collective over a vector of `values` numbers, a multiple of the ranks."""
    whole = torch.zeros(values, device=world.device)
    parts = whole.view(world.size, -1)
    part = torch.zeros_like(parts[0])
    given = torch.arange(1.0, world.size + 1.0, device=world.device)
    share = (world.size - 1) / world.size
    return (
        Collective(
            name="all-reduce",
            run=lambda: dist.all_reduce(whole),
            given=whole,
            ones=lambda: whole / given.sum(),
            bus_factor=2 * share,
        ),
        Collective(
            name="reduce-scatter",
            run=lambda: dist.reduce_scatter_tensor(part, whole),
            given=whole,
            ones=lambda: part / given.sum(),
            bus_factor=share,
        ),
        Collective(
            name="all-gather",
            run=lambda: dist.all_gather_into_tensor(whole, part),
            given=part,
            ones=lambda: parts / given[:, None],
            bus_factor=share,
        ),
    )


def measured(world: World, one: Collective, *, values: int, repeats: int) -> dict[str, Any]:
    """Returns the seconds and bandwidths of a collective, and whether it is right on every rank."""
    one.given.fill_(world.rank + 1.0)
    one.run()
    found = one.ones()
    is_wrong = world.any(not torch.allclose(found, torch.ones_like(found)))
    one.given.zero_()  # sums of sums would overflow
    for _ in range(_WARMUP):
        one.run()
    synchronise(world)
    world.barrier()
    started = time.perf_counter()
    for _ in range(repeats):
        one.run()
    synchronise(world)
    seconds = max(world.all_gather((time.perf_counter() - started) / repeats))
    return {
        "collective": one.name,
        "bytes": 4 * values,
        "seconds": seconds,
        "algorithm_bytes_per_second": 4 * values / seconds,
        "bus_bytes_per_second": one.bus_factor * 4 * values / seconds,
        "is_right": not is_wrong,
    }


def main() -> int:
    """Returns 1 if a collective is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    sizes, repeats = (_TINY_MEGABYTES, 2) if given.tiny else (MEGABYTES, 20)
    rows: list[dict[str, Any]] = []
    choose_accelerator()
    with joined_world() as world:
        about = {"device": world.device_name, "ranks": world.size, "backend": dist.get_backend(), "repeats": repeats}
        for megabytes in sizes:
            values = megabytes * 2**20 // 4 // world.size * world.size
            for one in collectives(world, values):
                rows.append(measured(world, one, values=values, repeats=repeats))
                if world.is_main:
                    write_json(given.out, about | {"rows": rows})
                    print(rows[-1], flush=True)
    return 0 if all(row["is_right"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
