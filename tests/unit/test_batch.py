from dataclasses import fields, replace

import pytest
import torch
from batches import build_batch
from masked_batches import build_masked_batch, random_pairs
from torch import Tensor

READ_BY_THE_MODEL = {"tokens", "position_ids", "token_type_ids", "cu_seqlens"}


def causal_batch():
    return build_batch([[[5, 6, 7], [8, 9]]], "packed", max_sequence_length=8)[0]


def masked_batch():
    return build_masked_batch([random_pairs([7, 4], vocabulary_size=20)], "packed", max_sequence_length=8)[0]


BATCHES = pytest.mark.parametrize("batch", [causal_batch(), masked_batch()], ids=["causal", "masked"])


def tensors(holder):
    return {field.name for field in fields(holder) if isinstance(getattr(holder, field.name), Tensor)}


def targets_of(batch):
    return [getattr(each, name) for each in batch.targets.values() for name in sorted(tensors(each))]


@BATCHES
def test_all_that_the_model_reads_moves_and_the_ids_stay(batch):
    moved = batch.to("meta")
    assert {name for name in tensors(batch) if getattr(moved, name).is_meta} == READ_BY_THE_MODEL
    assert list(moved.targets) == list(batch.targets)
    of_targets = targets_of(moved)
    assert len(of_targets) == len(targets_of(batch)) >= 2
    assert all(tensor.is_meta for tensor in of_targets)
    assert moved.step_counts == batch.step_counts
    on_device = [getattr(moved, name) for name in READ_BY_THE_MODEL]
    on_device += of_targets
    assert batch.moved_bytes == sum(tensor.element_size() * tensor.numel() for tensor in on_device) > 100


@BATCHES
def test_all_that_will_be_moved_is_page_locked(batch, monkeypatch):
    locked = []
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: locked.append(tensor.data_ptr()) or tensor)
    batch.pin_memory()
    expected = [getattr(batch, name).data_ptr() for name in READ_BY_THE_MODEL]
    expected += [tensor.data_ptr() for tensor in targets_of(batch)]
    assert sorted(locked) == sorted(expected)


@pytest.mark.parametrize(
    ("batch", "change", "message"),
    [
        (causal_batch(), {"targets": masked_batch().targets}, r"positions has shape \(5,\), expected \(2,\)"),
        (masked_batch(), {"targets": causal_batch().targets}, r"labels has shape \(5,\), expected \(11,\)"),
        (masked_batch(), {"cu_seqlens": torch.tensor([0, 11])}, "cu_seqlens has dtype torch.int64"),
    ],
)
def test_parts_that_do_not_fit_one_another_are_refused(batch, change, message):
    with pytest.raises(ValueError, match=message):
        replace(batch, **change)
