"""What a batch puts through a model.

`useful_work` leaves padding out, so a layout that pads more is not rewarded for it; `performed_work` is all that was
put through the model.
"""

import torch

from evenpack.batch import MaskedTargets, PackedBatch
from evenpack.models.common.cost import Work


def useful_work(batch: PackedBatch) -> Work:
    """Real tokens, what attention has to compute for them, and those and the sequences that count in the loss."""
    return Work(
        slots=batch.local_counts.tokens,
        squared_lengths=batch.squared_lengths,
        head_slots=batch.local_counts.targets - batch.padding_targets,
        sequences=batch.local_counts.sequences,
    )


def performed_work(batch: PackedBatch) -> Work:
    """All slots, padding and its segments included, and all rows of the heads; waits for the device if it is there."""
    lengths = batch.cu_seqlens.diff().to(torch.int64)
    return Work(
        slots=batch.slots,
        squared_lengths=int((lengths * lengths).sum()),
        head_slots=batch.targets.labels.shape[0],
        sequences=batch.targets.sequence_starts.shape[0] if isinstance(batch.targets, MaskedTargets) else 0,
    )
