"""The isolation probe of `evenpack doctor` on the device of each rank that a launcher started.

    python benchmarks/gpu_day/ranks.py RANKS benchmarks/gpu_day/isolation.py --out FILE.json

Every attention backend that can serve is probed, in both precisions and directions. Fails if a probe fails on any rank.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from evenpack.engine.world.distributed import World, joined_world
from evenpack.files import write_json
from evenpack.kernels.capabilities import AttentionRequest
from evenpack.launcher.doctor import IsolationReport, attention_requests, probe_all
from evenpack.launcher.processes.devices import choose_accelerator


def over_ranks(world: World, request: AttentionRequest) -> list[dict[str, Any]]:
    """Returns a row for each backend: the largest deviation of any rank and the smallest control.

    None: no rank had a value.
    """
    of_ranks = world.all_gather(probe_all(request))
    return [row(probes) for probes in zip(*of_ranks, strict=True)]


def row(probes: tuple[IsolationReport, ...]) -> dict[str, Any]:
    """Returns one backend's probes on all ranks as a row."""
    first = probes[0]
    controls = [one.control_deviation for one in probes if one.control_deviation is not None]
    return {
        "backend": first.backend,
        "request": first.request,
        "max_deviation": max((one.max_deviation for one in probes if one.max_deviation is not None), default=None),
        "control_deviation": min(controls, default=None),
        "tolerance": first.tolerance,
        "passed_on": sum(one.passed for one in probes),
        "errors": sorted({one.error for one in probes if one.error is not None}),
    }


def main() -> int:
    """Returns 1 if a probe failed on a rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    choose_accelerator()
    with joined_world() as world:
        for request in attention_requests(world.device.type):
            rows += over_ranks(world, request)
            if world.is_main:
                write_json(given.out, {"device": world.device_name, "ranks": world.size, "rows": rows})
        failed = [one for one in rows if one["passed_on"] < world.size]
        if world.is_main:
            print(f"{len(rows)} probes on {world.size} ranks, failed: {failed or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
