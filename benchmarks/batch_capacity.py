"""Compares sizes of a batch's index arrays: counted over the steps, the fullest packs together, rows x the fullest.

    python benchmarks/batch_capacity.py --histogram FILE.json --key wikipedia_512 [--depth 3] [--json]

Packs are of the longest length, assigned by the work of attention, with 15 % of tokens masked. Seconds are CPU time of
counting a million packs.
"""

import time
from typing import Any, cast

import measuring
import numpy as np

from evenpack.data.batches.capacity import BatchCapacity, capacity_of_any_batch, count_capacity
from evenpack.data.batches.objectives import DynamicMasks
from evenpack.data.batches.placement import Placer
from evenpack.data.order.plan import PackPlan
from evenpack.data.order.selection import PackedSource
from evenpack.data.order.step_plan import StepPlanner
from evenpack.data.order.step_shape import CostWeights, StepShape
from evenpack.data.packing import LengthHistogram, pack
from evenpack.data.recipes import MaskingConfig, SentencePairsRecipe
from evenpack.data.sequences import SequenceView
from evenpack.data.tokenizers.special_tokens import MaskingVocabulary
from evenpack.losses import MASKED_TOKEN, NEXT_SENTENCE

PACKS = 1_000_000


class LengthsAlone:
    """A view of sequences of which nothing but the length matters."""

    max_segments_per_sequence = 1

    def __init__(self, longest: int) -> None:
        self.max_sequence_length = longest

    def statistics(self, sequence_ids: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.ones_like(lengths), lengths**2

    def padding_counts(self, sequence_ids: np.ndarray) -> None:
        return None


def main() -> None:
    parser = measuring.parser_of(__doc__)
    measuring.add_histogram(parser)
    parser.add_argument("--depth", type=int, help="most sequences of a pack; default: no limit")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--packs-per-micro-batch", type=int, default=8)
    parser.add_argument("--accumulation", type=int, default=4)
    arguments = parser.parse_args()
    name, histogram = measuring.load_histogram(arguments)
    source, objective = source_of(histogram, arguments.depth), objective_of()
    rows = arguments.packs_per_micro_batch
    shape = shape_of(arguments.ranks * arguments.accumulation * rows, rows)
    planner = StepPlanner([source], [1], shape=shape, ranks=arguments.ranks, objective=objective)
    length = histogram.longest
    started = time.process_time()
    counted = count_capacity(planner, range(PACKS // shape.items_per_step), objective=objective, pack_length=length)
    seconds = time.process_time() - started
    placer = Placer.of([source], shape=shape, pack_length=length, is_bidirectional=objective.is_bidirectional)
    together = capacity_of_any_batch([source], placer=placer, objective=objective)
    report: dict[str, Any] = {"histogram": name, "depth": source.plan.max_sequences_per_pack, "ranks": arguments.ranks}
    report |= {"packs_per_micro_batch": rows, "accumulation": arguments.accumulation}
    report |= {f"{size}_of_rows_times_the_fullest": rows * value for size, value in fullest(source, objective).items()}
    report |= {f"{size}_of_the_fullest_together": value for size, value in sizes(together).items()}
    report |= {f"{size}_counted": value for size, value in sizes(counted).items()} | {"cpu_seconds": round(seconds, 1)}
    measuring.print_report(report, as_json=arguments.json)


def sizes(capacity: BatchCapacity) -> dict[str, int]:
    return {"segments": capacity.segments, "sequences": capacity.sequences, "targets": capacity.targets}


def fullest(source: PackedSource, objective: DynamicMasks) -> dict[str, int]:
    """Returns the sizes of a batch of one pack that holds the most of each."""
    depth = source.plan.max_sequences_per_pack
    targets = int(source.plan.largest_sums(objective.most_targets(source.view), 1)[0])
    return {"segments": depth + 1, "sequences": depth, "targets": targets}


def source_of(histogram: LengthHistogram, depth: int | None) -> PackedSource:
    packing = pack(histogram, "longest_pack_first", pack_length=histogram.longest, max_sequences_per_pack=depth)
    plan = PackPlan(packing, np.broadcast_to(np.int32(0), histogram.sequences), key=1)
    return PackedSource(view=cast(SequenceView, LengthsAlone(histogram.longest)), plan=plan, key=1)


def objective_of() -> DynamicMasks:
    vocabulary = MaskingVocabulary(mask_id=0, special=np.zeros(1, dtype=bool), continues=np.zeros(1, dtype=bool))
    return DynamicMasks(
        recipe=SentencePairsRecipe(kind="sentence_pairs", max_sequence_length=512),
        masking=MaskingConfig(),
        vocabulary=vocabulary,
        seed=1,
        masked_token=MASKED_TOKEN,
        next_sentence=NEXT_SENTENCE,
    )


def shape_of(packs_per_step: int, packs_per_micro_batch: int) -> StepShape:
    return StepShape(
        batching="packs",
        items_per_step=packs_per_step,
        items_per_micro_batch=packs_per_micro_batch,
        layout="packed",
        isolate=True,
        reset_positions=True,
        policy="cost_balanced",
        cost_weights=CostWeights(per_token=0.0, per_squared_length=1.0, per_segment=0.0),
        windows=(),
        balances_each_micro_batch=False,
    )


if __name__ == "__main__":
    main()
