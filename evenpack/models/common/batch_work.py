"""The work that a batch gives a model.

`useful_work` leaves padding out, so that a layout that pads more is not rewarded for it; `performed_work` counts all
that went through the model.
"""

import torch

from evenpack.batch import PackedBatch
from evenpack.losses import NEXT_SENTENCE
from evenpack.models.cost import Work


def useful_work(batch: PackedBatch) -> Work:
    """Returns the work on real tokens: in the blocks, in attention, and in the heads where a loss is taken."""
    return Work(
        slots=batch.local_counts.tokens,
        squared_lengths=batch.squared_lengths,
        head_slots=batch.local_counts.targets - batch.padding_targets,
        sequences=batch.local_counts.sequences,
    )


def performed_work(batch: PackedBatch) -> Work:
    """Returns the work on all slots, padding included, and on all rows of the heads; synchronises with the device."""
    lengths = batch.cu_seqlens.diff().to(torch.int64)
    return _work_on_all_slots(batch, squared_lengths=int((lengths * lengths).sum()))


def work_on_whole_rows(batch: PackedBatch, *, causal: bool) -> Work:
    """Returns the same where attention computes all pairs of a row's slots, and masks those that are not to be seen."""
    pairs = batch.slots * batch.row_slots
    # A causal model's operations are counted for half of a square and half of its diagonal: here nothing is skipped.
    return _work_on_all_slots(batch, squared_lengths=2 * pairs - batch.slots if causal else pairs)


def _work_on_all_slots(batch: PackedBatch, *, squared_lengths: int) -> Work:
    pairs = batch.targets.get(NEXT_SENTENCE.name)
    return Work(
        slots=batch.slots,
        squared_lengths=squared_lengths,
        head_slots=batch.head_rows,
        sequences=0 if pairs is None else pairs.labels.shape[0],
    )
