"""The steps of an hour on a node of GPUs, as data: what they measure needs several ranks, which `deepspeed` starts.

Limits are those of a slow node of eight H100, and together less than `MINUTES`: no step takes the time of another.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from gpu_day import BERT, ROOT, SMALL, XL
from gpu_day.runner import Step

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


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the steps are made for."""

    scratch: Path
    """Corpora, run files, and the steps' values."""
    has_gpu: bool
    is_tiny: bool

    @property
    def patience(self) -> int:
        """How many times longer than a GPU a step may take here."""
        return 1 if self.has_gpu else 20

    @property
    def corpora(self) -> Path:
        """The folder of corpora and run files."""
        return self.scratch / ("tiny" if self.is_tiny else "full")

    def run_file(self, name: str) -> str:
        """Returns the path of a run file of the day."""
        return str(self.corpora / "run_files" / f"{name}.yaml")

    def value(self, slug: str) -> str:
        """Returns the path of a step's values."""
        return str(self.scratch / "values" / f"{slug}.json")


def counts_of(gpus: int) -> list[int]:
    """Returns the numbers of ranks that are compared: all, then 1, then the powers of two between."""
    between = [2**power for power in range(1, gpus.bit_length()) if 2**power < gpus]
    return [gpus, 1, *between]


def steps_of_node(plan: Plan, gpus: int) -> tuple[Step, ...]:
    """Returns the steps: what the others need, then what is worth most; limits are those that this machine needs."""
    return tuple(replace(one, limit_seconds=one.limit_seconds * plan.patience) for one in _measurements(plan, gpus))


def _measurements(plan: Plan, gpus: int) -> Iterator[Step]:
    tiny = ("--tiny",) if plan.is_tiny else ()
    corpus = (sys.executable, str(_GPU_DAY / "corpus.py"), str(plan.corpora), SMALL, BERT, XL, *tiny)
    yield Step(name="corpora", command=corpus, limit_seconds=90)
    for name, options, minutes in (("collectives", tiny, 3.0), ("isolation", (), 4.0)):
        command = _on_ranks(gpus, str(_GPU_DAY / f"{name}.py"), "--out", plan.value(name), *options)
        yield Step(name=name, command=command, limit_seconds=60 * minutes)
    resuming = (
        str(_GPU_DAY / "resuming.py"),
        plan.run_file(SMALL),
        "--ranks",
        str(gpus),
        "--out",
        plan.value("resuming"),
    )
    yield Step(name="resuming", command=(sys.executable, *resuming), limit_seconds=60 * 11.0)
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
            f"deepspeed.zero_stage={_ZERO_STAGES[run]}",
        )
        name = f"throughput {run} on {ranks}"
        size = ("--rounds", "1", "--warmup", "1") if plan.is_tiny else ("--rounds", "8", "--warmup", "3")
        options = ("--layouts", "packed,unpadded,padded", "--samples", "0", "--depths", "", *size)
        study = ("--module", "evenpack.launcher.cli", "study", "throughput", plan.run_file(run), *overrides, *options)
        command = _on_ranks(ranks, *study, "--save", plan.value(name.replace(" ", "_")))
        yield Step(name=name, command=command, limit_seconds=60 * minutes)


def _on_ranks(ranks: int, *words: str) -> tuple[str, ...]:
    """Returns the command that starts these words, a program or `--module NAME`, on so many ranks by `deepspeed`."""
    return (sys.executable, str(_GPU_DAY / "ranks.py"), str(ranks), *words)


def _waits(plan: Plan, gpus: int) -> Step:
    """Returns the step that compares each rank's times in real steps with a replay of the same steps on one device."""
    counts = ",".join(str(ranks) for ranks in sorted(counts_of(gpus)) if ranks > 1)
    batch, packs, steps = ("4", "2", "2") if plan.is_tiny else ("32", "16", "6")
    size = ("--ranks", counts, "--batch", batch, "--packs", packs, "--steps", steps)
    program = (sys.executable, str(ROOT / "benchmarks/replay_against_ranks.py"), plan.run_file(BERT))
    return Step(name="waits", command=(*program, *size, "--save", plan.value("waits")), limit_seconds=60 * 10.0)
