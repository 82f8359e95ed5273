"""The parts of the day as data: the commands of each, in their order, with time limits.

A limit is what a step may take on one H100 at most; all of a part together may reach beyond it, and then the last ones
get what is left. Each part makes its corpora again.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from gpu_day.runner import ROOT, Step

EVENPACK = (sys.executable, "-c", "from evenpack.launcher.cli.app import main; main()")

PART_SECONDS = 530.0
"""Of a part: machines are lent for commands of ten minutes."""

BERT, SMALL, XL = "bert_large_phase2_sprint", "gpt2_small", "gpt2_xl"
_LAW_BATCH = 32
"""Sequences of a micro-batch of the published law."""

_MOST_TEST_PROCESSES = 14
"""With so many, 88 s were not enough for all tests on an H100."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a part is made for."""

    scratch: Path
    """Corpora, run files, packages, and the steps' values."""
    prefix: Path
    """Of the names of results."""
    has_gpu: bool
    is_tiny: bool
    installs: bool
    wheels: Path | None
    """A folder of wheels in place of an index; None: the index."""

    @property
    def patience(self) -> int:
        """How many times longer than a GPU a step may take here."""
        return 1 if self.has_gpu else 20

    @property
    def corpora(self) -> Path:
        """The folder of corpora and run files."""
        return self.scratch / ("tiny" if self.is_tiny else "full")

    @property
    def site(self) -> Path:
        """The folder of the packages that come from wheels."""
        return self.scratch / "site"

    def run_file(self, name: str) -> str:
        """Returns the path of a run file of the day."""
        return str(self.corpora / "run_files" / f"{name}.yaml")

    def value(self, slug: str) -> str:
        """Returns the path of a step's values."""
        return str(self.scratch / "values" / f"{slug}.json")


def steps_of(part: str, plan: Plan, only: str | None = None) -> tuple[Step, ...]:
    """Returns the steps of a part of `PARTS`: what the others need, then what is worth most.

    Args:
        only: what the names of the latter must contain; None: all of them.
    """
    wanted = [step for step in PARTS[part](plan) if only is None or only in step.name]
    return in_patience(plan, (*preparation(plan, (BERT,) if part == "R" else (SMALL, BERT, XL)), *wanted))


def in_patience(plan: Plan, steps: Iterable[Step]) -> tuple[Step, ...]:
    """Returns the steps with the limits that this machine needs."""
    return tuple(replace(step, limit_seconds=step.limit_seconds * plan.patience) for step in steps)


def preparation(plan: Plan, runs: tuple[str, ...]) -> Iterator[Step]:
    """Yields the steps that these runs need before any other: packages, and corpora."""
    if plan.installs:
        wheels = () if plan.wheels is None else ("--wheels", str(plan.wheels), "--target", str(plan.site))
        command = (sys.executable, str(ROOT / "benchmarks/gpu_day/install.py"), *wheels)
        yield Step(name="install", command=command, limit_seconds=90)
    tiny = ("--tiny",) if plan.is_tiny else ()
    corpus = (sys.executable, str(ROOT / "benchmarks/gpu_day/corpus.py"), str(plan.corpora), *runs, *tiny)
    yield Step(name="corpora", command=corpus, limit_seconds=90)


def _headlines(plan: Plan) -> Iterator[Step]:
    """Yields the runs of the headline numbers at their own steps, and the tests: what a dead machine must not take."""
    yield throughput(plan, f"throughput {SMALL} compiled", SMALL, *_compiled(plan), seconds=130)
    options = ["-m", "gpu", "-p", "no:cacheprovider", "-o", "addopts=-ra", "--tb=short", "--durations=20"]
    options.append("-v" if plan.has_gpu else "-q")
    if find_spec("xdist"):  # most of their time is that of compilers, on CPU cores
        options += ["-n", str(min(os.cpu_count() or 1, _MOST_TEST_PROCESSES))]
    options += ["-o", "filterwarnings="]  # those of a PyTorch that these tests have not met are no failures
    options += [] if plan.has_gpu else ["--collect-only"]
    tests = (sys.executable, "-m", "pytest", *options, str(ROOT / "tests/gpu"))
    yield Step(name="tests on the GPU", command=tests, limit_seconds=150)
    yield throughput(plan, f"throughput {BERT} compiled", BERT, *_compiled(plan), seconds=110)
    yield throughput(plan, f"throughput {XL} compiled", XL, *_compiled(plan), seconds=150)
    yield resuming(plan, ranks=1, seconds=140)
    without = (*_compiled(plan), "model.attention_dropout=0")
    yield throughput(plan, f"throughput {BERT} compiled without attention dropout", BERT, *without, seconds=90)


def _replay(plan: Plan) -> Iterator[Step]:
    """Yields the steps of many ranks, replayed rank by rank on this device.

    An estimate is 6 minutes, by the 0.93 s that a step of one rank takes in all five schemes on one H100.
    """
    ranks, count = ("1,2", "2") if plan.is_tiny else ("1,8,64", "2")
    options = ("--replay", ranks, "--replay-steps", count, "--devices", ranks, "--no-published")
    command = (*EVENPACK, "study", "imbalance", plan.run_file(BERT), *options, "--save", plan.value("replay"))
    yield Step(name="replay", command=command, limit_seconds=450)


def _design(plan: Plan) -> Iterator[Step]:
    """Yields what decides the next design, and where the time of a step goes."""
    program = str(ROOT / "benchmarks/gpu_day/design.py")
    tiny = ("--tiny",) if plan.is_tiny else ()
    command = (sys.executable, program, "--out", plan.value("design"), *tiny)
    yield Step(name="design", command=command, limit_seconds=180)
    steps = ("--steps", "2") if plan.is_tiny else ()
    yield _program(f"checks {SMALL}", plan, "checks.py", SMALL, *_compiled(plan), *steps, seconds=80)
    for name, seconds in ((SMALL, 80), (BERT, 80), (XL, 120)):
        words = (*_compiled(plan), "--steps", "1" if plan.is_tiny else "3")
        yield _program(f"profile {name}", plan, "profile_step.py", name, *words, seconds=seconds)
    yield _program(f"checks {BERT}", plan, "checks.py", BERT, *_compiled(plan), *steps, seconds=80)


def _curves(plan: Plan) -> Iterator[Step]:
    """Yields packs against padding and un-padding, with cost models and without attention dropout, and eager code."""
    without = "model.attention_dropout=0"
    for name, overrides in ((BERT, (without,)), (SMALL, ())):
        cost_model = plan.prefix.with_name(f"{plan.prefix.name}_cost_model_{name}.json")
        options = ("--cost-model", str(cost_model), "--samples", "16" if plan.is_tiny else "40")
        layouts = ("--layouts", "padded,unpadded,packed")
        yield throughput(plan, f"throughput {name} layouts", name, *overrides, *layouts, *options, seconds=150)
    overhead = (str(ROOT / "benchmarks/packing_overhead.py"), plan.run_file(BERT), without)
    rounds = ("--rounds", "1" if plan.is_tiny else "6", "--json", plan.value("packing_overhead"))
    yield Step(name="packing overhead", command=(sys.executable, *overhead, *rounds), limit_seconds=100)
    yield throughput(plan, f"throughput {SMALL} eager", SMALL, seconds=90)
    batch = 2 if plan.is_tiny else _LAW_BATCH
    size = (f"training.packs_per_step={batch}", f"training.packs_per_micro_batch={batch}")
    steps = ("--steps", "4") if plan.is_tiny else ()
    yield _program("law of one device", plan, "law.py", BERT, without, *size, *steps, seconds=120)


PARTS: dict[str, Callable[[Plan], Iterator[Step]]] = {"A": _headlines, "R": _replay, "B": _design, "C": _curves}
"""The parts by name, in the order in which they are worth the machine's time."""


def _compiled(plan: Plan) -> tuple[str, ...]:
    """Returns the override that compiles, which a tiny model is not worth."""
    return () if plan.is_tiny else ("training.compile=true",)


def on_ranks(ranks: int, *words: str) -> tuple[str, ...]:
    """Returns the command that starts these words, a program or `--module NAME`, on so many ranks by `deepspeed`."""
    return (sys.executable, str(ROOT / "benchmarks/gpu_day/ranks.py"), str(ranks), *words)


def throughput(
    plan: Plan, name: str, run: str, *words: str, seconds: float, evenpack: tuple[str, ...] = EVENPACK
) -> Step:
    """Returns the step that times a run: its packs alone, unless `words` say otherwise.

    Args:
        evenpack: what starts the command line, on one rank or on several.
    """
    slug = name.replace(" ", "_")
    given = words if "--layouts" in words else (*words, "--layouts", "packed", "--samples", "0")
    size = ("--rounds", "1", "--warmup", "1") if plan.is_tiny else ("--rounds", "8", "--warmup", "3")
    options = ("--depths", "", *size, "--save", plan.value(slug))
    command = (*evenpack, "study", "throughput", plan.run_file(run), *given, *options)
    return Step(name=name, command=command, limit_seconds=seconds)


def resuming(plan: Plan, *, ranks: int, seconds: float) -> Step:
    """Returns the step that trains GPT-2 124M by `deepspeed`, with a stop and without, and compares both."""
    program = (sys.executable, str(ROOT / "benchmarks/gpu_day/resuming.py"), plan.run_file(SMALL))
    command = (*program, "--ranks", str(ranks), "--out", plan.value("resuming"))
    return Step(name="resuming", command=command, limit_seconds=seconds)


def _program(name: str, plan: Plan, program: str, run: str, *words: str, seconds: float) -> Step:
    path, value = str(ROOT / "benchmarks/gpu_day" / program), plan.value(name.replace(" ", "_"))
    command = (sys.executable, path, plan.run_file(run), *words, "--out", value)
    return Step(name=name, command=command, limit_seconds=seconds)
