"""The steps of the day as data: names, commands, time limits, and what each needs.

Times are of one H100; the limits leave room, and their sum is not reached. Kernels that a machine lacks make their own
steps fail, and no other.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gpu_day.runner import Step

ROOT = Path(__file__).parents[2]
EVENPACK = (sys.executable, "-c", "from evenpack.launcher.cli.app import main; main()")

_MINUTE = 60.0
_BERT = "bert_large_phase2"
_CORPORA = {"bert": _BERT, "decoder_1024": "gpt2_small", "decoder_2048": "llama_160m"}
"""A run of each corpus."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the day is made for."""

    directory: Path
    device: str
    """cuda or cpu."""
    is_tiny: bool
    installs: bool
    wheels: Path | None
    """A folder of wheels in place of an index; None: the index."""

    @property
    def rounds(self) -> int:
        """Returns the timed steps of each layout."""
        return 1 if self.is_tiny else 8

    def run_file(self, name: str) -> str:
        """Returns the path of a run file of the day."""
        return str(self.directory / "run_files" / f"{name}.yaml")

    def result(self, name: str) -> str:
        """Returns the path of a step's values."""
        return str(self.directory / "results" / f"{name}.json")


def steps_of(plan: Plan) -> tuple[Step, ...]:
    """Returns the steps in their order: what later ones need first, then what is worth most."""
    return (
        *_installation(plan),
        *_examination(plan),
        *_data(plan),
        *_checks(plan),
        *_throughput(plan),
        _law(plan),
        _profile(plan, _BERT),
        _profile(plan, "gpt2_small"),
        *_batches(plan),
        _overhead(plan),
    )


def _installation(plan: Plan) -> Iterator[Step]:
    if plan.installs:
        wheels = () if plan.wheels is None else ("--wheels", str(plan.wheels))
        command = (sys.executable, str(ROOT / "benchmarks/gpu_day/install.py"), *wheels)
        yield Step(name="install", command=command, limit_seconds=4 * _MINUTE)


def _examination(plan: Plan) -> Iterator[Step]:
    yield Step(name="doctor and isolation probe", command=(*EVENPACK, "doctor"), limit_seconds=2 * _MINUTE)
    collect = ("--collect-only",) if plan.device == "cpu" else ()
    yield Step(
        name="tests on the GPU",
        command=(
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-m",
            "gpu",
            "-p",
            "no:xdist",
            "-p",
            "no:cacheprovider",
            *collect,
            str(ROOT / "tests/gpu"),
        ),
        limit_seconds=6 * _MINUTE,
    )


def _data(plan: Plan) -> Iterator[Step]:
    tiny = ("--tiny",) if plan.is_tiny else ()
    corpus = (sys.executable, str(ROOT / "benchmarks/gpu_day/corpus.py"), str(plan.directory), *tiny)
    yield Step(name="corpora", command=corpus, limit_seconds=2 * _MINUTE)
    for name, run in _CORPORA.items():
        yield Step(
            name=f"prepare {name}",
            command=(*EVENPACK, "prepare", plan.run_file(run)),
            limit_seconds=2 * _MINUTE,
            needs=("corpora",),
        )


def _checks(plan: Plan) -> Iterator[Step]:
    for name in (_BERT, "gpt2_small"):
        without = ("model.attention_dropout=0",) if name == _BERT else ()
        steps = ("--steps", "2") if plan.is_tiny else ()
        yield _program(f"checks {name}", plan, "checks.py", name, *steps, *without)


def _throughput(plan: Plan) -> Iterator[Step]:
    """Yields every family in all layouts, by the chosen kernel, then the small ones with every kernel that may
    serve."""
    for name in (_BERT, "gpt2_small", "gpt2_xl", "llama_160m"):
        yield _measured(plan, f"throughput {name} auto", name, cost_model=True, plot=True)
    for name in (_BERT, "gpt2_small"):
        without = ("model.attention_dropout=0",) if name == _BERT else ()
        overrides = ("training.compile=true", *without, "--layouts", "padded,packed")
        yield _measured(plan, f"throughput {name} compiled", name, *overrides)
    kernels = ("sdpa",) if plan.device == "cpu" else ("varlen", "flash", "flex", "sdpa")
    for kernel in kernels:
        for name in (_BERT, "gpt2_small", "llama_160m"):
            without = ("model.attention_dropout=0",) if name == _BERT else ()
            yield _measured(plan, f"throughput {name} {kernel}", name, f"attention.backend={kernel}", *without)


def _batches(plan: Plan) -> Iterator[Step]:
    for packs in (1, 2) if plan.is_tiny else (4, 8, 16, 32, 64):
        size = (f"training.packs_per_step={packs}", f"training.packs_per_micro_batch={packs}")
        yield _measured(plan, f"throughput {_BERT} of {packs} packs", _BERT, *size, "--layouts", "unpadded,packed")


def _measured(plan: Plan, name: str, run: str, *overrides: str, cost_model: bool = False, plot: bool = False) -> Step:
    slug = name.replace(" ", "_")
    options = ["--depths", "", "--rounds", str(plan.rounds), "--warmup", "1" if plan.is_tiny else "3"]
    options += ["--samples", "16" if plan.is_tiny else "40"] if cost_model else ["--samples", "0"]
    if cost_model:
        options += ["--cost-model", plan.result(f"cost_model_{run}")]
    if plot:
        options += ["--plot", str(plan.directory / "figures" / f"{slug}.png")]
    command = (*EVENPACK, "study", "throughput", plan.run_file(run), *overrides, *options, "--save", plan.result(slug))
    return Step(name=name, command=command, limit_seconds=3 * _MINUTE, needs=(_prepared(run),))


def _law(plan: Plan) -> Step:
    batch = 2 if plan.is_tiny else 32
    size = (f"training.packs_per_step={batch}", f"training.packs_per_micro_batch={batch}")
    steps = ("--steps", "4") if plan.is_tiny else ()
    return _program("law of one device", plan, "law.py", _BERT, *steps, *size)


def _profile(plan: Plan, run: str) -> Step:
    return _program(f"profile {run}", plan, "profile_step.py", run, "--steps", "1" if plan.is_tiny else "3")


def _overhead(plan: Plan) -> Step:
    """Returns table 1 of PackedBERT: the cost of packs over full rows, without the run's kernels of attention
    dropout."""
    program = str(ROOT / "benchmarks/packing_overhead.py")
    options = ("--rounds", "1" if plan.is_tiny else "6", "--json", plan.result("packing_overhead"))
    command = (sys.executable, program, plan.run_file(_BERT), "model.attention_dropout=0", *options)
    return Step(name="packing overhead", command=command, limit_seconds=3 * _MINUTE, needs=(_prepared(_BERT),))


def _program(name: str, plan: Plan, program: str, run: str, *words: str) -> Step:
    slug = name.replace(" ", "_")
    path = str(ROOT / "benchmarks/gpu_day" / program)
    command = (sys.executable, path, plan.run_file(run), *words, "--out", plan.result(slug))
    return Step(name=name, command=command, limit_seconds=3 * _MINUTE, needs=(_prepared(run),))


def _prepared(run: str) -> str:
    corpora = {"bert_large_phase2": "bert", "gpt2_small": "decoder_1024", "gpt2_xl": "decoder_1024"}
    return f"prepare {corpora.get(run, 'decoder_2048')}"
