"""The steps of an hour on a node of GPUs, as data: what they measure needs several ranks, which `deepspeed` starts.

Limits are those of a slow node of eight H100, and together less than `MINUTES`: no step takes the time of another.
"""

import sys
from collections.abc import Iterator

from gpu_day.runner import ROOT, Step
from gpu_day.steps import BERT, SMALL, XL, Plan, in_patience, on_ranks, preparation, resuming, throughput

MINUTES = 60.0

FEWEST_GPUS = 2
"""The hour compares ranks with each other; what one GPU can show is measured by `scripts/gpu_day`."""

_GPU_DAY = ROOT / "benchmarks/gpu_day"

_SIZES = {BERT: (48, 24), XL: (16, 2)}
"""Packs of each rank in a step and in a micro-batch. A step of GPT-2 XL has an eighth of its run file's, which would
leave time for few rounds. Padding lays out the same sequences in two and three times as many rows, which must fit into
80 GB, on one GPU with the whole optimizer."""

_ZERO_STAGES = {BERT: 0, XL: 1}
"""Those of the run files."""

_PLANNED_STEPS = 200
"""Steps that the timed runs have: each rank first counts the segments of all of them, which with several ranks takes
minutes for the 30,000 of GPT-2 XL's run file."""


def counts_of(gpus: int) -> list[int]:
    """Returns the numbers of ranks that are compared: all, then 1, then the powers of two between."""
    between = [2**power for power in range(1, gpus.bit_length()) if 2**power < gpus]
    return [gpus, 1, *between]


def steps_of_node(plan: Plan, gpus: int) -> tuple[Step, ...]:
    """Returns the steps: what the others need, then what is worth most."""
    return in_patience(plan, (*preparation(plan, (SMALL, BERT, XL)), *_measurements(plan, gpus)))


def _measurements(plan: Plan, gpus: int) -> Iterator[Step]:
    tiny = ("--tiny",) if plan.is_tiny else ()
    for name, options, minutes in (("collectives", tiny, 3.0), ("isolation", (), 4.0)):
        command = on_ranks(gpus, str(_GPU_DAY / f"{name}.py"), "--out", plan.value(name), *options)
        yield Step(name=name, command=command, limit_seconds=60 * minutes)
    yield resuming(plan, ranks=gpus, seconds=60 * 11.0)
    all_ranks, *fewer = counts_of(gpus)
    yield from _layouts(plan, all_ranks)
    for ranks in fewer:
        yield from _layouts(plan, ranks)
    yield _waits(plan, gpus)


def _layouts(plan: Plan, ranks: int) -> Iterator[Step]:
    """Yields packed, unpadded and padded steps of as much work for each rank, whatever their number."""
    for run, minutes in ((BERT, 2.5), (XL, 3.5)):
        packs, each = (2, 1) if plan.is_tiny else _SIZES[run]
        overrides = (
            f"training.packs_per_step={packs * ranks}",
            f"training.packs_per_micro_batch={each}",
            f"training.steps={_PLANNED_STEPS}",
            "schedule.warmup_steps=1",
            f"deepspeed.zero_stage={_ZERO_STAGES[run]}",
        )
        layouts = ("--layouts", "packed,unpadded,padded", "--samples", "0")
        evenpack = on_ranks(ranks, "--module", "evenpack.launcher.cli")
        name = f"throughput {run} on {ranks}"
        yield throughput(plan, name, run, *overrides, *layouts, seconds=60 * minutes, evenpack=evenpack)


def _waits(plan: Plan, gpus: int) -> Step:
    """Returns the step that compares each rank's times in real steps with a replay of the same steps on one device."""
    counts = ",".join(str(ranks) for ranks in sorted(counts_of(gpus)) if ranks > 1)
    batch, packs, steps = ("4", "2", "2") if plan.is_tiny else ("32", "16", "6")
    size = ("--ranks", counts, "--batch", batch, "--packs", packs, "--steps", steps)
    program = (sys.executable, str(ROOT / "benchmarks/replay_against_ranks.py"), plan.run_file(BERT))
    return Step(name="waits", command=(*program, *size, "--save", plan.value("waits")), limit_seconds=60 * 10.0)
