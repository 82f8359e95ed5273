"""The sizes of a batch: its slots are the same in each step of a packed run, index arrays as long as it needs."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from pair_sources import VOCABULARY_SIZE, masked_objective, pair_source, random_halves, random_sentence_pairs
from sources import packed_source
from step_shapes import step_shape

from evenpack.batch import PackedBatch
from evenpack.data.batches.collate import Collator
from evenpack.data.batches.objectives import NextTokens, Objective
from evenpack.data.order.selection import PackedSource
from evenpack.data.order.step_plan import StepPlanner
from evenpack.data.order.step_shape import StepShape

PACK_LENGTH = 64
LONGEST = 48


def random_source(seed: int, *, key: int = 7, sequences: int = 60) -> PackedSource:
    random = np.random.default_rng(seed)
    lengths = np.minimum(random.geometric(0.08, size=(sequences, 1)), LONGEST)
    return packed_source(lengths.tolist(), pack_length=PACK_LENGTH, longest=LONGEST, key=key)


def random_pairs(seed: int, *, key: int = 7) -> PackedSource:
    pairs = random_sentence_pairs(random_halves(60, longest=LONGEST, seed=seed), seed=seed)
    return pair_source(pairs, pack_length=PACK_LENGTH, longest=LONGEST, key=key)


def planner_of(sources: list[PackedSource], shape: StepShape, objective: Objective, ranks: int) -> StepPlanner:
    return StepPlanner(sources, [1] * len(sources), shape=shape, ranks=ranks, objective=objective)


def batches_of(planner: StepPlanner, steps: int) -> Iterator[PackedBatch]:
    collator = Collator(
        planner.sources,
        shape=planner.shapes[0],
        objective=planner.objective,  # type: ignore[arg-type]
        pack_length=PACK_LENGTH,
        padding_token=0,
        vocabulary_size=VOCABULARY_SIZE if isinstance(planner.objective, type(masked_objective())) else 1_000_000,
    )
    for step in range(steps):
        plan = planner.plan(step)
        for rank in range(planner.ranks):
            for index in range(planner.micro_batches.size(0)):
                yield collator.collate(plan.micro_batch(rank, index), plan.counts)


PACKS = step_shape(items_per_step=256, items_per_micro_batch=8)
ROWS = step_shape(items_per_step=256, items_per_micro_batch=8, layout="padded", batching="sequences", policy="arrival")

STATIC = {
    "packed, next tokens": (PACKS, False),
    "packed, masked tokens": (PACKS, True),
    "padded, next tokens": (ROWS, False),
    "padded, masked tokens": (ROWS, True),
    "packed, in order": (replace(PACKS, policy="arrival"), False),
    "packed, not isolated": (replace(PACKS, isolate=False), True),
}


def sources_of(shape: StepShape, *, is_masked: bool) -> list[PackedSource]:
    if shape.batching == "packs":
        make = random_pairs if is_masked else random_source
        return [make(1, key=1), make(2, key=2)]
    if is_masked:  # no two of them fit into a pack
        halves = [(first, 12 + first % 5) for first in range(11, 28)]
        return [pair_source(random_sentence_pairs(halves, seed=3), pack_length=LONGEST, longest=LONGEST)]
    lengths = np.random.default_rng(4).integers(1, LONGEST + 1, 60)
    source = packed_source([[one] for one in lengths.tolist()], pack_length=LONGEST, longest=LONGEST, algorithm="none")
    return [source]


@pytest.mark.parametrize("case", STATIC)
def test_slots_are_the_same_in_each_batch_and_index_arrays_as_long_as_it_needs(case: str) -> None:
    shape, is_masked = STATIC[case]
    objective: Objective = masked_objective() if is_masked else NextTokens()
    planner = planner_of(sources_of(shape, is_masked=is_masked), shape, objective, ranks=2)
    slots, rooms, contents = set(), set(), set()
    for batch in batches_of(planner, steps=10):
        assert type(batch.max_sequence_length) is type(batch.position_rows) is int
        slots.add((*batch.tokens.shape, *batch.position_ids.shape, batch.row_slots, batch.max_sequence_length))
        segments = int((batch.cu_seqlens < batch.slots).sum())
        contents.add((segments, batch.local_counts.sequences, batch.local_counts.targets))
        sizes = {"segments": (segments, len(batch.cu_seqlens) - 1)}
        sizes["sequences"] = (batch.local_counts.sequences, len(batch.sequence_ids))
        if is_masked:
            sizes["targets"] = (batch.local_counts.targets, len(batch.targets["masked_token"].labels))
            sizes["pairs"] = (batch.local_counts.sequences, len(batch.targets["next_sentence"].labels))
        for needed, room in sizes.values():
            assert room % 64 == 0
            assert needed <= room < needed + 64
        rooms.add(tuple(room for _, room in sizes.values()))
    assert len(slots) == 1
    assert len(contents) > 5 or shape.batching == "sequences", "the batches differ in what they hold"
    assert len(rooms) <= 8, "compiled code and memory meet few sizes"


def test_a_rectangle_for_the_sequences_of_packs_has_as_many_rows_as_those_have_sequences() -> None:
    shape = step_shape(items_per_step=8, items_per_micro_batch=2, layout="padded")
    planner = planner_of([random_source(1)], shape, NextTokens(), ranks=2)
    assert len({batch.slots for batch in batches_of(planner, steps=10)}) > 1


def test_packs_that_a_batch_lacks_are_rows_of_padding_unless_sizes_vary_anyway() -> None:
    shape = step_shape(items_per_step=8, items_per_micro_batch=4)
    planner = planner_of([random_source(1)], shape, NextTokens(), ranks=1)
    packs = planner.plan(0).packs.take(np.arange(3))
    for fills_rows, rows in ((True, 4), (False, 3)):
        collator = Collator(
            planner.sources,
            shape=shape,
            objective=NextTokens(),
            pack_length=PACK_LENGTH,
            padding_token=0,
            vocabulary_size=1_000_000,
            fills_rows=fills_rows,
        )
        assert collator.collate(packs, planner.plan(0).counts).slots == rows * PACK_LENGTH
