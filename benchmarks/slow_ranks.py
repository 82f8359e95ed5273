"""Ranks that are slowed down on purpose, and a long run in which none is: who is named, when, and at what cost.

    python benchmarks/slow_ranks.py [--steps 1000] [--healthy-steps 10000] [--measured FILE] [--json FILE]

Four gloo ranks train a tiny GPT-2 on this machine, one thread each, on un-padded sequences by arrival, so that their
work differs in every step. In turn rank 2 computes more (a constant share, a share that creeps up, twice as much in
every fourth step), and rank 1 gets its batches late. The passes are judged by the seconds that each rank had of a CPU,
so that other work of the machine does not count; the loader by the clock.

What the healthy ranks measured is then drawn again, in blocks, for runs of 10,000 steps in which no rank is slow, and
for ranks that are slowed down. A larger cluster is not measured there: its ranks have the noise of these.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import measuring
import numpy as np
from jaxtyping import Float64

from evenpack.data.batches.pipeline import training_batches
from evenpack.engine import build, train
from evenpack.engine.config import RunConfig
from evenpack.engine.engine import Stopwatch, TrainingEngine
from evenpack.engine.reporting.metrics import METRICS, read_metrics
from evenpack.engine.reporting.rank_waits import (
    FALSE_ALARM_PROBABILITY,
    FIT_STEPS,
    LEARNING_STEPS,
    WARM_UP_STEPS,
    SlowTest,
    WaitModel,
)
from evenpack.engine.reporting.run_record import read_run_record
from evenpack.engine.world.distributed import World
from evenpack.studies.waits import WaitsOfRun, read_waits

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from forked_ranks import run_ranks
from run_files import prepared, run_config, run_values, text_sources
from waiting_ranks import expected_delay

RANKS = 4
FIRST_JUDGED = WARM_UP_STEPS + FIT_STEPS + LEARNING_STEPS + 1
BLOCK = 25
"""Steps in a row that are drawn together, so that what neighbours have in common is kept."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Slows one rank down for some steps, numbered from 1."""

    name: str
    rank: int
    first: int
    last: int
    kind: str = "compute"

    def share(self, step: int) -> float:
        """Returns the time that a step takes longer, as a share of what the passes take."""
        if not self.first <= step <= self.last:
            return 0.0
        number = step - self.first
        return {
            "constant 20 %": 0.2,
            "creeping by 0.5 % a step": 0.005 * number,
            "twice in every fourth step": float(number % 4 == 0),
            "slow loader": 0.5,
        }[self.name]


def faults_of(steps: int) -> list[Fault]:
    """Returns the faults of a run, one after the other, with healthy steps between them."""
    names = ("constant 20 %", "creeping by 0.5 % a step", "twice in every fourth step", "slow loader")
    each = (steps - FIRST_JUDGED) // (2 * len(names))
    starts = [FIRST_JUDGED + each * (2 * index + 1) for index in range(len(names))]
    return [
        Fault(
            name=name,
            rank=1 if name == "slow loader" else 2,
            first=first,
            last=first + each - 1,
            kind="loader" if name == "slow loader" else "compute",
        )
        for name, first in zip(names, starts, strict=True)
    ]


def train_with_faults(world: World, config: RunConfig, faults: list[Fault]) -> dict[str, Any]:
    """Trains with these faults on one rank; returns what its tests observed, and the seconds of explaining."""
    observed: dict[str, list[tuple[int, float]]] = {"compute": [], "loader": []}
    seconds: list[float] = []
    with _slowed(world.rank, faults), _observed(observed, seconds):
        train.train_in(world, config, stop_requested=lambda: False)
    return {"observed": observed, "explaining_seconds": statistics.median(seconds)}


@contextmanager
def _slowed(rank: int, faults: list[Fault]) -> Iterator[None]:
    """Makes a rank compute more, by the time that its process gets, and its batches come late, by the clock."""
    mine = [fault for fault in faults if fault.rank == rank]
    passes: dict[str, list[float]] = {"compute": [], "loader": []}
    step = 0

    def extra(kind: str) -> float:
        usual = statistics.median(passes[kind][-50:]) if passes[kind] else 0.0
        return usual * sum(fault.share(step) for fault in mine if fault.kind == kind)

    def late(*args: Any, **options: Any) -> Iterator[Any]:
        nonlocal step
        for batches in made(*args, **options):
            step = batches.step + 1
            time.sleep(extra("loader"))
            yield batches

    def slowed(engine: Any, *args: Any) -> Any:
        took = extra("compute")
        end = Stopwatch.stop

        def stop(stopwatch: Any) -> None:
            passes["compute"].append(time.process_time() - stopwatch._cpu_started)
            passes["loader"].append(time.perf_counter() - stopwatch._started)
            until = time.process_time() + took
            while time.process_time() < until:
                pass
            end(stopwatch)

        with patch.object(Stopwatch, "stop", stop):
            return compute(engine, *args)

    made, compute = training_batches, TrainingEngine.compute_gradients
    with patch.object(build, "training_batches", late), patch.object(TrainingEngine, "compute_gradients", slowed):
        yield


@contextmanager
def _observed(observed: dict[str, list[tuple[int, float]]], seconds: list[float]) -> Iterator[None]:
    """Keeps the excesses that are judged, and what all of the model costs in a step."""
    own_values, explain, observe = WaitModel.own_values, WaitModel.explain, SlowTest.observe
    kinds: dict[int, str] = {}

    def keep(test: SlowTest, step: int, excess: float) -> bool:
        observed[kinds[id(test)]].append((step, excess))
        return observe(test, step, excess)

    def timed_values(one: Any, **values: float) -> Any:
        kinds.update({id(test): kind for kind, test in one.tests.items()})
        started = time.process_time()
        found = own_values(one, **values)
        seconds.append(time.process_time() - started)
        return found

    def timed_explain(one: Any, step: int, *reduced: Any) -> Any:
        started = time.process_time()
        found = explain(one, step, *reduced)
        seconds[-1] += time.process_time() - started
        return found

    with (
        patch.object(SlowTest, "observe", keep),
        patch.object(WaitModel, "own_values", timed_values),
        patch.object(WaitModel, "explain", timed_explain),
    ):
        yield


def run_of(folder: Path, *, steps: int) -> RunConfig:
    """Returns a prepared run of a tiny model, whose ranks get un-padded sequences of all lengths by arrival."""
    generator = np.random.default_rng(4)
    documents = [
        "".join(generator.choice(list("abcdefgh"), size=length)) for length in generator.integers(2, 250, 600).tolist()
    ]
    values = run_values(
        "gpt2",
        folder,
        data={
            "sources": text_sources(folder, {"one": documents}),
            "recipe": {"kind": "documents", "max_sequence_length": 256},
            "pack_length": 256,
        },
        training={
            "batching": "sequences",
            "layout": "unpadded",
            "assignment": "arrival",
            "packs_per_step": None,
            "packs_per_micro_batch": None,
            "sequences_per_step": 8 * RANKS,
            "sequences_per_micro_batch": 8,
            "steps": steps,
            "checkpoint_every_steps": None,
            "evaluate_every_steps": None,
        },
    )
    return prepared(run_config(values))


def train_all(folder: Path, *, steps: int) -> tuple[RunConfig, list[Fault], list[dict[str, Any]]]:
    """Trains on four ranks, with one fault after another; returns what each rank observed."""
    config = run_of(folder, steps=steps)
    faults = faults_of(steps)
    return config, faults, run_ranks(train_with_faults, RANKS, config, faults)


def named(found: WaitsOfRun, fault: Fault) -> dict[str, Any]:
    """Returns when the rank of a fault was named, and when it was well again, in steps after the fault and its end."""
    episode = next(
        (
            one
            for one in found.episodes
            if (one.rank, one.kind) == (fault.rank, fault.kind) and fault.first <= one.named <= fault.last
        ),
        None,
    )
    return {
        "fault": fault.name,
        "rank": fault.rank,
        "first": fault.first,
        "last": fault.last,
        "named_after": None if episode is None else episode.named - fault.first,
        "slow_by": None if episode is None else episode.slow_by,
        "well_after": None if episode is None or episode.ended is None else episode.ended - fault.last,
    }


def healthy_noise(ranks: list[dict[str, Any]], faults: list[Fault]) -> list[Float64[np.ndarray, " steps"]]:
    """Returns what each rank's passes took beyond the others' in steps without a fault of computing, less its mean."""
    in_fault = {step for fault in faults if fault.kind == "compute" for step in range(fault.first, fault.last + 1)}
    kept = [np.array([one for step, one in rank["observed"]["compute"] if step not in in_fault]) for rank in ranks]
    return [values - values.mean() for values in kept]


def drawn(
    noise: list[Float64[np.ndarray, " steps"]], generator: np.random.Generator, steps: int
) -> Float64[np.ndarray, " steps"]:
    """Returns as many steps of one of the ranks, in blocks."""
    values = noise[generator.integers(len(noise))]
    starts = generator.integers(0, len(values) - BLOCK + 1, -(-steps // BLOCK))
    found: Float64[np.ndarray, " steps"] = values[(starts[:, None] + np.arange(BLOCK)).reshape(-1)[:steps]]
    return found


def healthy_runs(noise: list[Float64[np.ndarray, " steps"]], *, ranks: int, steps: int, runs: int) -> dict[str, Any]:
    """Returns how many ranks of healthy runs were named."""
    generator = np.random.default_rng(ranks)
    per_step = FALSE_ALARM_PROBABILITY / (2 * ranks * steps)
    false_alarms = 0
    for _ in range(runs * ranks):
        test = SlowTest(per_step=per_step)
        excesses = drawn(noise, generator, steps).tolist()
        false_alarms += any(test.observe(step, excess) for step, excess in enumerate(excesses))
    return {"ranks": ranks, "steps": steps, "runs": runs, "false_alarms": false_alarms}


def slowed_runs(
    noise: list[Float64[np.ndarray, " steps"]], *, slowdown: float, ranks: int, steps: int, runs: int
) -> dict[str, Any]:
    """Returns how soon a rank that is slower from a step on is named, and then well again."""
    generator = np.random.default_rng(0)
    per_step = FALSE_ALARM_PROBABILITY / (2 * ranks * steps)
    onset, end = LEARNING_STEPS + 100, LEARNING_STEPS + 600
    delays: list[int] = []
    recoveries: list[int] = []
    promised: list[float] = []
    for _ in range(runs):
        test = SlowTest(per_step=per_step)
        values = drawn(noise, generator, end + 400)
        values[onset:end] = (1.0 + values[onset:end]) * (1.0 + slowdown) - 1.0
        changes = [step for step, excess in enumerate(values.tolist()) if test.observe(step, excess)]
        assert test.rule is not None, "it has learned"
        promised.append(expected_delay(test.rule, slowdown))
        delays += [step - onset + 1 for step in changes[:1] if step >= onset]
        recoveries += [step - end + 1 for step in changes[1:2] if step >= end]
    return {
        "slowdown": slowdown,
        "runs": runs,
        "named": len(delays),
        "median_delay": float(np.median(delays)) if delays else None,
        "longest_delay": max(delays, default=None),
        "expected_delay": float(np.median(promised)),
        "recovered": len(recoveries),
        "median_recovery": float(np.median(recoveries)) if recoveries else None,
    }


def main() -> None:
    """Trains, draws healthy and slowed runs, and prints all of it as JSON."""
    parser = measuring.parser_of(__doc__, json_file=True)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--healthy-steps", type=int, default=10_000)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--keep", type=Path, help="keep the run there, for `evenpack waits`")
    parser.add_argument("--measured", type=Path, help="a report of before, whose noise is drawn: nothing is trained")
    given = parser.parse_args()
    report = trained(given) if given.measured is None else json.loads(given.measured.read_text())
    noise = [np.array(values) for values in report["excesses"]]
    steps = given.healthy_steps
    report["healthy"] = [healthy_runs(noise, ranks=count, steps=steps, runs=given.runs) for count in (4, 64)]
    report["slowed"] = [
        slowed_runs(noise, slowdown=slowdown, ranks=64, steps=steps, runs=200) for slowdown in (0.05, 0.1, 0.2, 0.5)
    ]
    measuring.write_report(report, given.json)
    print(json.dumps({name: value for name, value in report.items() if name != "excesses"}, indent=2))


def trained(given: argparse.Namespace) -> dict[str, Any]:
    """Trains with the faults; returns what was measured."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        config, faults, ranks = train_all(folder, steps=given.steps)
        found = read_waits(config.run.output_dir)
        records = read_metrics(config.run.output_dir / METRICS)
        record = read_run_record(config.run.output_dir)
    assert record is not None, "it has just trained"
    start = record.starts[-1]
    noise = healthy_noise(ranks, faults)
    return {
        "device": f"{RANKS} x {start.device}",
        "commit": start.commit,
        "torch": start.torch,
        "date": start.date,
        "steps": given.steps,
        "step_seconds": statistics.median(one["step_seconds"] for one in records),
        "explaining_seconds": max(rank["explaining_seconds"] for rank in ranks),
        "noise": [float(values.std()) for values in noise],
        "least_slowdown": max(next(one["ranks"]["compute_least_slowdown"] for one in records[::-1] if "ranks" in one)),
        "faults": [named(found, fault) for fault in faults],
        "named": len(found.episodes),
        "shares": {part.name: part.share for part in found.parts},
        "excesses": [[round(value, 5) for value in values.tolist()] for values in noise],
    }


if __name__ == "__main__":
    main()
