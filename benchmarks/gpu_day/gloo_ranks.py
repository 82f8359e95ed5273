"""Losses of a few steps on ranks that share one GPU, at ZeRO 0 and 1; by gloo, because NCCL refuses such ranks.

torchrun --nproc-per-node 2 benchmarks/gpu_day/gloo_ranks.py RUN.yaml --out FILE.json [section.key=value ...]
"""

import argparse
import gc
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evenpack.engine.world.distributed import World, joined_world, quiet_deepspeed
from evenpack.files import write_json
from evenpack.launcher.processes.devices import choose_accelerator
from gpu_day.stepping import Contender, Variant

STEPS = 3


def losses_of(run_file: Path, settings: Sequence[str], world: World) -> dict[str, Any]:
    """Returns the loss of each step, and the seconds of all."""
    contender, started = Contender.of(run_file, settings, Variant(name="as it is"), world), time.monotonic()
    return {"losses": contender.losses(STEPS), "seconds": time.monotonic() - started}


def main() -> None:
    """Takes the steps on every rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_file", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_intermixed_args()
    os.environ["LOCAL_RANK"] = "0"  # the same GPU for all
    choose_accelerator()
    quiet_deepspeed().get_accelerator()._communication_backend_name = "gloo"
    found: dict[str, Any] = {}
    with joined_world() as world:
        for stage in (0, 1):
            overrides = [*given.overrides, f"deepspeed.zero_stage={stage}"]
            try:
                found[f"ZeRO {stage}"] = losses_of(given.run_file, overrides, world)
            except RuntimeError as error:  # a collective that gloo does not have, on every rank
                found[f"ZeRO {stage}"] = {"error": f"{type(error).__name__}: {error}"[:500]}
            gc.collect()
            if world.is_main:
                write_json(given.out, found)


if __name__ == "__main__":
    main()
