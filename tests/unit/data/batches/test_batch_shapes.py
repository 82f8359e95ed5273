"""The sizes of a batch: its slots are the same in each step of a packed run, index arrays as long as it needs."""

from dataclasses import replace

import numpy as np
import pytest
from collated import NEXT_TOKENS, batches_of, collator_of, planner_of
from pair_sources import VOCABULARY_SIZE, masked_objective, pair_source, random_halves, random_sentence_pairs
from sources import packed_source
from step_shapes import step_shape

from evenpack.data.order.selection import PackedSource
from evenpack.data.order.step_shape import StepShape

PACK_LENGTH = 64
LONGEST = 48


def random_source(seed: int) -> PackedSource:
    lengths = np.minimum(np.random.default_rng(seed).geometric(0.08, size=(60, 1)), LONGEST)
    return packed_source(lengths.tolist(), pack_length=PACK_LENGTH, longest=LONGEST, key=seed)


def random_pairs(seed: int) -> PackedSource:
    pairs = random_sentence_pairs(random_halves(60, longest=LONGEST, seed=seed), seed=seed)
    return pair_source(pairs, pack_length=PACK_LENGTH, longest=LONGEST, key=seed)


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
        return [make(1), make(2)]
    if is_masked:  # no two of them fit into a pack
        halves = [(first, 12 + first % 5) for first in range(11, 28)]
        return [pair_source(random_sentence_pairs(halves, seed=3), pack_length=LONGEST, longest=LONGEST)]
    lengths = np.random.default_rng(4).integers(1, LONGEST + 1, 60)
    source = packed_source([[one] for one in lengths.tolist()], pack_length=LONGEST, longest=LONGEST, algorithm="none")
    return [source]


@pytest.mark.parametrize("case", STATIC)
def test_slots_are_the_same_in_each_batch_and_index_arrays_as_long_as_it_needs(case: str) -> None:
    shape, is_masked = STATIC[case]
    objective, sources = masked_objective() if is_masked else NEXT_TOKENS, sources_of(shape, is_masked=is_masked)
    planner = planner_of(sources, shape, objective, ranks=2)
    vocabulary_size = VOCABULARY_SIZE if is_masked else 1_000_000
    collator = collator_of(sources, shape, objective, pack_length=PACK_LENGTH, vocabulary_size=vocabulary_size)
    slots, rooms, contents = set(), set(), set()
    for _, batch in [one for step in range(3) for one in batches_of(planner, collator, step)]:
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
    shape, sources = step_shape(items_per_step=8, items_per_micro_batch=2, layout="padded"), [random_source(1)]
    planner, collator = planner_of(sources, shape), collator_of(sources, shape, pack_length=PACK_LENGTH)
    assert len({batch.slots for step in range(10) for _, batch in batches_of(planner, collator, step)}) > 1


def test_packs_that_a_batch_lacks_are_rows_of_padding_unless_sizes_vary_anyway() -> None:
    shape, sources = step_shape(items_per_step=8, items_per_micro_batch=4), [random_source(1)]
    plan = planner_of(sources, shape).plan(0)
    for fills_rows, rows in ((True, 4), (False, 3)):
        collator = collator_of(sources, shape, pack_length=PACK_LENGTH, fills_rows=fills_rows)
        assert collator.collate(plan.packs.take(np.arange(3)), plan.counts).slots == rows * PACK_LENGTH
