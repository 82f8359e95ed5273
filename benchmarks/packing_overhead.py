"""Measures the cost of packing itself: steps on packs compared with steps on as many full rows of one sequence each.

    python benchmarks/packing_overhead.py RUN.yaml [section.key=value ...]

Run `evenpack prepare` with the same arguments first, for a run of sentence pairs. All rows come from the same prepared
file and have the same number of slots:

    packed         packs of several pairs, each a segment of its own
    one_segment    the same packs, each as one segment: attention does the same work as for a full row
    full           pairs that fill a row by themselves: no packing and no padding

One model does forward and backward passes over the three in turn, so that load on the machine affects all of them;
updates, which cost the same, are left out. Costs are medians over rounds of the ratio to `full` in the same
round, minus 1. `by_flops` divides both by the floating-point operations performed (`evenpack.models.cost`). Seconds are
CPU seconds of the process's threads on a CPU, otherwise wall-clock seconds. `--longest` packs only pairs up to that
length, for packs of more sequences than the run's own.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import measuring
import numpy as np

from evenpack.batch import PackedBatch
from evenpack.config import load_run_file
from evenpack.data.batches.collate import Collator
from evenpack.data.order.plan import PackPlan, sort_by_length
from evenpack.data.order.selection import PackedSource
from evenpack.data.order.step_plan import StepPlanner
from evenpack.data.packing import LengthHistogram, pack
from evenpack.data.prepared import packed_sources
from evenpack.engine.build import build_model
from evenpack.engine.config import RunConfig
from evenpack.engine.engine import TrainingEngine
from evenpack.engine.resolving.resolve import ResolvedRun, open_run
from evenpack.engine.world.distributed import World, configure_logging, joined_world
from evenpack.errors import DataError
from evenpack.models.cost import performed_work, step_flops


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The origin of the batches of one kind."""

    planner: StepPlanner
    collator: Collator

    def batches(self, step: int) -> list[PackedBatch]:
        """Plans the step, reads its tokens, masks and collates them."""
        plan = self.planner.plan(step)
        return [self.collator.collate(plan.micro_batch(0, index), plan.counts) for index in range(plan.micro_batches)]


def main() -> None:
    arguments = _parse_arguments()
    config = load_run_file(arguments.run_file, RunConfig, arguments.overrides)
    with joined_world() as world:
        configure_logging(world)
        report = measure(config, world, longest=arguments.longest, rounds=arguments.rounds, warmup=arguments.warmup)
    print(json.dumps(report, indent=2))
    measuring.write_report(report, arguments.json)


def measure(config: RunConfig, world: World, *, longest: int | None, rounds: int, warmup: int) -> dict[str, Any]:
    """Returns medians over `rounds` steps of each kind, and the costs of packing."""
    run = open_run(config)
    config, prepared = run.config, run.prepared
    engine = TrainingEngine(build_model(run, world.device), config, world, denominators=run.denominators)
    kinds = kinds_of_rows(run, longest=longest)
    timings: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    order = list(kinds)
    for number in range(warmup + rounds):
        for kind in order:
            timing = _time_step(engine, kinds[kind], number, prepared.vocabulary_size)
            if number >= warmup:
                timings[kind].append(timing)
        order = [*order[1:], order[0]]
    return {
        "run": config.run.name,
        "model": config.model.shape,
        **measuring.device_facts(world.device),
        "precision": config.training.precision,
        "pack_length": config.data.pack_length,
        "packs_per_step": config.training.items_per_step,
        "packs_per_micro_batch": config.training.packs_per_micro_batch,
        "longest_packed": longest,
        "rounds": rounds,
        "rows": {kind: _medians(timings[kind]) for kind in kinds},
        "costs": {kind: costs(timings[kind], timings["full"]) for kind in ("packed", "one_segment")},
    }


def kinds_of_rows(run: ResolvedRun, *, longest: int | None) -> dict[str, Rows]:
    """Returns the pairs that fill a row. Raises: DataError if there are none."""
    prepared, config = run.prepared, run.config
    (source,) = packed_sources(prepared, "train", seed=config.run.seed)[:1]
    lengths = source.view.lengths()
    full = np.flatnonzero(lengths == prepared.pack_length)
    if len(full) == 0:
        raise DataError(
            f"no pair has {prepared.pack_length} tokens, so no row is full without packing: "
            "prepare with data.recipe.max_sequence_length = data.pack_length"
        )
    packed = source if longest is None else _repacked(source, np.flatnonzero(lengths <= longest), "auto")
    return {
        "packed": _rows(run, packed, isolate=True),
        "one_segment": _rows(run, packed, isolate=False),
        "full": _rows(run, _repacked(source, full, "none"), isolate=True),
    }


def _repacked(source: PackedSource, sequence_ids: np.ndarray, algorithm: str) -> PackedSource:
    """Returns a source with these sequences of the same file alone, packed again."""
    lengths = source.view.lengths()[sequence_ids]
    histogram = LengthHistogram.from_lengths(lengths, longest=source.plan.pack_length)
    packing = pack(histogram, algorithm, pack_length=source.plan.pack_length)
    chosen = sequence_ids[sort_by_length(lengths, histogram)]
    return replace(source, plan=PackPlan(packing, chosen, key=0))


def _rows(run: ResolvedRun, source: PackedSource, *, isolate: bool) -> Rows:
    shape = replace(run.shape, isolate=isolate)
    collator = Collator(
        [source],
        shape=shape,
        objective=run.objective,
        pack_length=run.prepared.pack_length,
        padding_token=run.prepared.tokenizer.padding_id,
        vocabulary_size=run.prepared.vocabulary_size,
    )
    return Rows(planner=StepPlanner([source], [1], shape=shape, ranks=1, objective=run.objective), collator=collator)


def _time_step(engine: TrainingEngine, rows: Rows, step: int, vocabulary_size: int) -> dict[str, float]:
    """Returns the seconds of collation and of forward and backward passes, and the work done in them."""
    started = measuring.device_seconds(engine.world.device)
    batches = rows.batches(step)
    collated = measuring.device_seconds(engine.world.device)
    engine.compute_gradients(step, batches)
    computed = measuring.device_seconds(engine.world.device)
    for parameter in engine.model.parameters():
        parameter.grad = None
    works = [performed_work(batch) for batch in batches]
    work = sum(works[1:], works[0])
    counts = batches[0].step_counts
    return {
        "collate_seconds": collated - started,
        "passes_seconds": computed - collated,
        "flops": step_flops(engine.config.model, vocabulary_size=vocabulary_size, work=work),
        "slots": work.slots,
        "tokens": counts.tokens,
        "sequences": counts.sequences,
        "masked_tokens": counts.targets,
        "head_rows": work.head_slots,
        "squared_lengths": work.squared_lengths,
    }


def costs(timings: list[dict[str, float]], full: list[dict[str, float]]) -> dict[str, float]:
    """Returns costs relative to a full row: 0.04 is 4 % more."""

    def against(cost: Callable[[dict[str, float]], float]) -> float:
        return statistics.median(cost(mine) / cost(theirs) for mine, theirs in zip(timings, full, strict=True)) - 1.0

    return {
        "raw": against(lambda timing: timing["collate_seconds"] + timing["passes_seconds"]),
        "by_flops": against(lambda timing: (timing["collate_seconds"] + timing["passes_seconds"]) / timing["flops"]),
        "passes": against(lambda timing: timing["passes_seconds"]),
        "collation": against(lambda timing: timing["collate_seconds"]),
    }


def _medians(timings: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(timing[name] for timing in timings) for name in timings[0]}


def _parse_arguments() -> argparse.Namespace:
    parser = measuring.parser_of(__doc__, run_file=True, json_file=True)
    parser.add_argument("--longest", type=int, help="pack pairs up to this length alone")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=1)
    return parser.parse_intermixed_args()


if __name__ == "__main__":
    main()
