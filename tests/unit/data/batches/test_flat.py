"""A batch as one block of memory comes back as it was, also from another process."""

import pickle
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from batches import build_batch, random_sequences
from masked_batches import build_masked_batch, random_pairs

from evenpack.batch import PackedBatch, Targets
from evenpack.data.batches.flat import FlatBatch


def batches() -> list[PackedBatch]:
    sequences = [random_sequences([5, 3, 6], vocabulary_size=50), random_sequences([9], vocabulary_size=50)]
    pairs = [random_pairs([7, 9], vocabulary_size=50), random_pairs([11], vocabulary_size=50)]
    of_nothing = build_masked_batch(pairs, "packed", max_sequence_length=12, pack_length=17)[0]
    none = {name: of_nothing_in(targets) for name, targets in of_nothing.targets.items()}
    return [
        build_batch(sequences, "packed", max_sequence_length=10, pack_length=15, windows=(2, 5))[0],
        build_masked_batch(pairs, "packed", max_sequence_length=12, pack_length=17)[0],
        replace(of_nothing, targets=none, sequence_ids=of_nothing.sequence_ids[:0], pairs_within={4: 61, 9: 83}),
    ]


def of_nothing_in(targets: Targets) -> Targets:
    empty: dict[str, Any] = {field.name: getattr(targets, field.name)[:0] for field in fields(targets)}
    return replace(targets, **empty)


def assert_same(found: PackedBatch, expected: PackedBatch) -> None:
    assert list(found.targets) == list(expected.targets)
    of_losses = zip(found.targets.values(), expected.targets.values(), strict=True)
    for holder, other in ((found, expected), *of_losses):
        assert type(holder) is type(other)
        for field in fields(other):
            value, wanted = getattr(holder, field.name), getattr(other, field.name)
            if isinstance(wanted, torch.Tensor):
                assert (value.dtype, value.shape, value.stride()) == (wanted.dtype, wanted.shape, wanted.stride())
                assert torch.equal(value, wanted), field.name
            elif field.name != "targets":
                assert value == wanted


@pytest.mark.parametrize("number", range(3))
def test_a_batch_comes_back_as_it_was(number: int) -> None:
    batch = batches()[number]
    flat = FlatBatch.of(batch)
    assert_same(flat.batch(), batch)
    assert_same(pickle.loads(pickle.dumps(flat)).batch(), batch)


@pytest.mark.parametrize("number", range(2))
def test_all_tensors_are_in_one_block_and_begin_where_any_type_can_be_read(number: int) -> None:
    flat = FlatBatch.of(batches()[number])
    batch = flat.batch()
    begin, end = flat.block.data_ptr(), flat.block.data_ptr() + flat.block.nbytes
    for tensor in (*batch.moved_tensors, batch.sequence_ids):
        assert begin <= tensor.data_ptr() <= tensor.data_ptr() + tensor.nbytes <= end
        assert (tensor.data_ptr() - begin) % 64 == 0


def test_page_locking_is_of_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    locked = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: locked.append(tensor) or tensor.clone())
    batch = batches()[0]
    assert_same(FlatBatch.of(batch).pin_memory().batch(), batch)
    assert len(locked) == 1
