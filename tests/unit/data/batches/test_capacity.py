"""The sizes of index arrays: exact over the planned steps, never exceeded, the same in every batch of every rank."""

import hashlib
import threading
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pair_sources import VOCABULARY_SIZE, masked_objective, pair_source, random_halves, random_sentence_pairs
from sources import packed_source
from step_shapes import step_shape

from evenpack.batch import PackedBatch
from evenpack.data.batches import capacity
from evenpack.data.batches.capacity import BatchCapacity, CapacityAhead, capacity_of_any_batch, count_capacity
from evenpack.data.batches.collate import Collator
from evenpack.data.batches.objectives import NextTokens, Objective
from evenpack.data.order.selection import PackedSource
from evenpack.data.order.step_plan import StepPlanner
from evenpack.data.order.step_shape import StepShape
from evenpack.errors import DataError

PACK_LENGTH = 64
LONGEST = 48


def random_source(seed: int, *, key: int = 7, sequences: int = 60, segments: int = 1) -> PackedSource:
    random = np.random.default_rng(seed)
    lengths = np.minimum(random.geometric(0.08, size=(sequences, segments)), LONGEST // segments)
    return packed_source(lengths.tolist(), pack_length=PACK_LENGTH, longest=LONGEST, key=key)


def random_pairs(seed: int, *, key: int = 7) -> PackedSource:
    pairs = random_sentence_pairs(random_halves(60, longest=LONGEST, seed=seed), seed=seed)
    return pair_source(pairs, pack_length=PACK_LENGTH, longest=LONGEST, key=key)


def planner_of(sources: list[PackedSource], shape: StepShape, objective: Objective, ranks: int) -> StepPlanner:
    return StepPlanner(sources, [1] * len(sources), shape=shape, ranks=ranks, objective=objective)


def collator_of(planner: StepPlanner, found: BatchCapacity | None) -> Collator:
    return Collator(
        planner.sources,
        shape=planner.shape,
        objective=planner.objective,  # type: ignore[arg-type]
        pack_length=PACK_LENGTH,
        padding_token=0,
        vocabulary_size=VOCABULARY_SIZE if isinstance(planner.objective, type(masked_objective())) else 1_000_000,
        capacity=found,
    )


def capacity_of(planner: StepPlanner, objective: Objective, *, steps: int) -> BatchCapacity:
    return count_capacity(planner, range(steps), objective=objective, pack_length=PACK_LENGTH)


def batches_of(planner: StepPlanner, collator: Collator, steps: int) -> Iterator[tuple[int, PackedBatch]]:
    for step in range(steps):
        plan = planner.plan(step)
        for rank in range(planner.ranks):
            for index in range(planner.micro_batches):
                yield rank, collator.collate(plan.micro_batch(rank, index), plan.counts)


def forms(batch: PackedBatch) -> list[Any]:
    """Shapes, strides and types of all tensors, and the numbers of the host that shapes of kernels depend on."""
    tensors = [getattr(holder, field.name) for holder in (batch, *batch.targets.values()) for field in fields(holder)]
    found: list[Any] = [
        (tuple(one.shape), one.stride(), str(one.dtype)) for one in tensors if isinstance(one, torch.Tensor)
    ]
    assert type(batch.max_sequence_length) is type(batch.position_rows) is int
    return [*found, batch.max_sequence_length, batch.position_rows]


def hash_of(batch: PackedBatch) -> str:
    return hashlib.sha256(repr(forms(batch)).encode()).hexdigest()


PACKS = step_shape(items_per_step=64, items_per_micro_batch=2)
ROWS = step_shape(items_per_step=64, items_per_micro_batch=2, layout="padded", batching="sequences", policy="arrival")

STATIC = {
    "packed, next tokens": (PACKS, False, 1000),
    "packed, masked tokens": (PACKS, True, 1000),
    "padded, next tokens": (ROWS, False, 1000),
    "padded, masked tokens": (ROWS, True, 1000),
    "packed, in order": (replace(PACKS, policy="arrival"), False, 200),
    "packed, not isolated": (replace(PACKS, isolate=False), True, 200),
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
def test_a_thousand_batches_of_a_layout_have_one_shape_on_every_rank(case: str) -> None:
    shape, is_masked, batches = STATIC[case]
    objective: Objective = masked_objective() if is_masked else NextTokens()
    planner = planner_of(sources_of(shape, is_masked=is_masked), shape, objective, ranks=2)
    steps = -(-batches // (planner.ranks * planner.micro_batches))
    collator = collator_of(planner, capacity_of(planner, objective, steps=steps))
    hashes: dict[int, set[str]] = {0: set(), 1: set()}
    loads = set()
    for rank, batch in batches_of(planner, collator, steps):
        hashes[rank].add(hash_of(batch))
        loads.add((batch.local_counts.sequences, batch.local_counts.targets))
    assert len(loads) > 5 or shape.batching == "sequences", "the batches differ in what they hold"
    assert hashes[0] == hashes[1]
    assert len(hashes[0]) == 1


def test_the_hash_of_shapes_sees_what_varies() -> None:
    """A rectangle for the sequences of packs has as many rows as those have sequences."""
    shape = step_shape(items_per_step=8, items_per_micro_batch=2, layout="padded")
    planner = planner_of([random_source(1)], shape, NextTokens(), ranks=2)
    collator = collator_of(planner, capacity_of(planner, NextTokens(), steps=20))
    assert len({hash_of(batch) for _, batch in batches_of(planner, collator, 20)}) > 1


shapes = st.sampled_from(
    [
        {"layout": "packed"},
        {"layout": "packed", "isolate": False},
        {"layout": "packed", "policy": "arrival"},
        {"layout": "unpadded"},
        {"layout": "padded"},
    ]
)


@given(settings_of_shape=shapes, seed=st.integers(0, 99), ranks=st.sampled_from([1, 2, 4]), is_masked=st.booleans())
@settings(deadline=None, max_examples=20)
def test_the_capacity_is_what_the_fullest_micro_batch_needs(
    settings_of_shape: dict[str, Any], seed: int, ranks: int, *, is_masked: bool
) -> None:
    shape = step_shape(items_per_step=8, items_per_micro_batch=2, **settings_of_shape)
    objective: Objective = masked_objective() if is_masked else NextTokens()
    make = random_pairs if is_masked else random_source
    planner = planner_of([make(seed, key=1), make(seed + 1, key=2)], shape, objective, ranks)
    found = capacity_of(planner, objective, steps=6)
    roomy = BatchCapacity(segments=500, sequences=500, targets=500, counted=None, follows=False)
    batches = [batch for _, batch in batches_of(planner, collator_of(planner, roomy), 6)]
    needed = max(int((batch.cu_seqlens < batch.slots).sum()) for batch in batches)
    assert found.sequences == max(batch.local_counts.sequences for batch in batches)
    assert needed <= found.segments
    if shape.layout == "packed":
        assert found.segments == needed
    most = max(batch.local_counts.targets for batch in batches) if is_masked else 0
    assert most <= found.targets < most + capacity.ROW_MULTIPLE
    assert (found.targets > 0) == is_masked
    bound = capacity_of_any_batch(planner.sources, placer=collator_of(planner, roomy).placer, objective=objective)
    assert (bound.segments, bound.sequences, bound.targets) >= (found.segments, found.sequences, found.targets)


def test_sequences_of_several_segments_are_counted_by_segments() -> None:
    shape = step_shape(items_per_step=8, items_per_micro_batch=2)
    planner = planner_of([random_source(3, segments=3)], shape, NextTokens(), ranks=2)
    found = capacity_of(planner, NextTokens(), steps=10)
    assert found.segments > 2 * found.sequences
    assert all(len(batch.cu_seqlens) == found.segments + 1 for _, batch in batches_of_found(planner, found))


def batches_of_found(planner: StepPlanner, found: BatchCapacity) -> Iterator[tuple[int, PackedBatch]]:
    yield from batches_of(planner, collator_of(planner, found), 10)


@pytest.fixture
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four steps of eight packs are counted together."""
    monkeypatch.setattr(capacity, "_ITEMS_AT_ONCE", 35)


GROWING = step_shape(items_per_step=8, items_per_micro_batch=2)


def ahead_of(planner: StepPlanner, *, start_step: int = 0, planned_steps: int = 30) -> CapacityAhead:
    return CapacityAhead(
        planner,
        planned_steps=planned_steps,
        objective=masked_objective(),
        pack_length=PACK_LENGTH,
        start_step=start_step,
    )


def sizes(found: BatchCapacity) -> tuple[int, int, int]:
    return found.segments, found.sequences, found.targets


@pytest.mark.parametrize("start_step", [0, 6])
def test_a_capacity_is_that_of_the_steps_counted_so_far_and_never_shrinks(few_at_once: None, start_step: int) -> None:
    planner = planner_of([random_pairs(1, key=1), random_pairs(2, key=2)], GROWING, masked_objective(), ranks=2)
    ahead = ahead_of(planner, start_step=start_step)
    known: dict[int, tuple[int, int, int]] = {}
    expected = (0, 0, 0)
    for step in range(start_step, 30):
        window = range(step - step % 4, min(step - step % 4 + 4, 30))
        of_window = count_capacity(planner, window, objective=masked_objective(), pack_length=PACK_LENGTH)
        expected = tuple(max(pair) for pair in zip(expected, sizes(of_window), strict=True))  # type: ignore[assignment]
        known[step] = sizes(ahead.at(step))
        assert known[step] == expected
        assert ahead.now.counted == window
    assert len(set(known.values())) > 1, "it grows in this run"


def test_what_comes_next_is_counted_once_and_before_it_is_needed(
    few_at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    planner = planner_of([random_pairs(1)], GROWING, masked_objective(), ranks=2)
    counted: list[range] = []
    threads = set()
    count = capacity.count_capacity

    def noted(planner: StepPlanner, steps: range, **named: Any) -> BatchCapacity:
        counted.append(steps)
        threads.add(threading.current_thread() is threading.main_thread())
        return count(planner, steps, **named)

    monkeypatch.setattr(capacity, "count_capacity", noted)
    ahead = ahead_of(planner, planned_steps=10)
    assert (counted, threads) == ([range(4)], {True})
    for step in range(10):
        ahead.at(step)
    assert counted == [range(4), range(4, 8), range(8, 10)], "nothing beyond the planned steps"
    assert threads == {True, False}
    ahead.at(11)
    assert counted[3:] == [range(10, 12)], "until somebody asks for it"
    ahead.at(1)
    assert counted[4:] == [range(4)]


def test_sizes_do_not_depend_on_how_the_steps_are_shared_by_loaders(few_at_once: None) -> None:
    """Of seven loaders each gets every seventh step, so that windows of four steps pass without an item for it."""
    planner = planner_of([random_pairs(1, key=1), random_pairs(2, key=2)], GROWING, masked_objective(), ranks=2)
    alone, shared = ahead_of(planner), [ahead_of(planner) for _ in range(7)]
    found = [sizes(shared[step % 7].at(step)) for step in range(30)]
    assert found == [sizes(alone.at(step)) for step in range(30)]
    assert len(set(found)) > 1


def test_an_error_of_counting_ahead_is_raised_where_the_steps_are_needed(
    few_at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = ahead_of(planner_of([random_pairs(1)], GROWING, masked_objective(), ranks=2))

    def fails(*_: Any, **__: Any) -> BatchCapacity:
        raise DataError("a column is damaged")

    monkeypatch.setattr(ahead, "_count", fails)
    ahead.at(3)
    with pytest.raises(DataError, match="a column is damaged"):
        ahead.at(4)


def test_fewer_items_of_a_large_source_are_counted_at_once(few_at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    planner = planner_of([random_pairs(1)], GROWING, masked_objective(), ranks=2)
    monkeypatch.setattr(capacity, "_LARGE_SOURCE", 10)
    monkeypatch.setattr(capacity, "_ITEMS_AT_ONCE_OF_LARGE", 16)
    assert ahead_of(planner, start_step=5).now.counted == range(4, 6)


def test_the_fullest_packs_together_are_a_bound_for_any_batch() -> None:
    """One pack of 60 sequences among 30 of two: two of it, of two epochs, never three or more, count."""
    source = packed_source([[1]] * 60 + [[30], [34]] * 30, pack_length=64, longest=48)
    shape = step_shape(items_per_step=16, items_per_micro_batch=8)
    planner = planner_of([source], shape, NextTokens(), ranks=2)
    exact = capacity_of(planner, NextTokens(), steps=10)
    collator = collator_of(planner, None)
    bound = collator.capacity
    depth = source.plan.max_sequences_per_pack
    assert (exact.counted, bound.counted) == (range(10), None)
    assert bound.sequences == 2 * depth + 6 * 2 < 8 * depth
    assert exact.sequences <= depth + 7 * 2
    assert len({hash_of(batch) for _, batch in batches_of(planner, collator, 10)}) == 1


def test_batches_that_follow_their_content_have_no_capacity_of_their_own() -> None:
    shape = step_shape(
        items_per_step=8, items_per_micro_batch=2, layout="unpadded", batching="sequences", policy="max_tokens"
    )
    planner = planner_of([random_source(1)], shape, NextTokens(), ranks=2)
    assert capacity_of(planner, NextTokens(), steps=10).follows


@pytest.mark.parametrize("name", ["segments", "sequences", "targets"])
def test_a_micro_batch_beyond_the_capacity_is_refused_by_name(name: str) -> None:
    shape = step_shape(items_per_step=8, items_per_micro_batch=2)
    objective = masked_objective()
    planner = planner_of([random_pairs(1)], shape, objective, ranks=2)
    found = capacity_of(planner, objective, steps=10)
    least = {"segments": 1, "sequences": 1, "targets": 16}[name]
    smaller = replace(found, **{name: getattr(found, name) - least})  # type: ignore[arg-type]
    with pytest.raises(DataError, match=rf"a micro-batch has \d+ {name}, but no step .* prepared data has changed"):
        list(batches_of(planner, collator_of(planner, smaller), 10))


def test_slots_and_masked_rows_are_multiples_of_sixteen_where_the_pack_length_is() -> None:
    shape = step_shape(items_per_step=6, items_per_micro_batch=3)
    objective = masked_objective()
    planner = planner_of([random_pairs(1)], shape, objective, ranks=2)
    collator = collator_of(planner, capacity_of(planner, objective, steps=5))
    for _, batch in batches_of(planner, collator, 5):
        assert (batch.slots % 16, len(batch.targets["masked_token"].labels) % 16) == (0, 0)
