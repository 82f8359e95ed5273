"""Builds batches by hand from token lists, so that model tests do not depend on the collator."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch

from evenpack.batch import PackedBatch, SlotTargets
from evenpack.losses import StepCounts
from evenpack.visible_pairs import total_pairs_within

Layout = Literal["packed", "unpadded", "padded"]
LAYOUTS: tuple[Layout, ...] = ("packed", "unpadded", "padded")

PADDING_TOKEN = 3
"""An ordinary entry of the vocabulary: padding must be harmless because nothing reads it, not by its value."""

_EMPTY_SEGMENTS = 2


def build_batch(
    packs: Sequence[Sequence[Sequence[int]]],
    layout: Layout,
    *,
    max_sequence_length: int,
    pack_length: int | None = None,
    padding_token: int = PADDING_TOKEN,
    windows: Sequence[int] = (),
) -> tuple[PackedBatch, list[slice]]:
    """Returns the packs' sequences in one layout, and the slots of each, in order.

    Args:
        packs: lists of sequences, each a list of token ids.
        pack_length: slots of a row of the packed layout; None: as many as the fullest pack needs.
        windows: windows whose pairs are counted.
    """
    sequences = [list(sequence) for pack in packs for sequence in pack]
    row_slots = pack_length or max(sum(map(len, pack)) for pack in packs)
    segments: list[tuple[list[int], int]] = []  # real tokens, slots
    for pack in packs:
        for sequence in pack:
            segments.append((list(sequence), max_sequence_length if layout == "padded" else len(sequence)))
        padding = row_slots - sum(map(len, pack)) if layout == "packed" else 0
        while padding > 0:
            segments.append(([], min(padding, max_sequence_length)))
            padding -= max_sequence_length
    tokens, labels, weights, positions, ends, spans = [], [], [], [], [0], []
    for real, slots in segments:
        padding = slots - len(real)
        predictions = max(len(real) - 1, 0)
        if real:
            spans.append(slice(len(tokens), len(tokens) + len(real)))
        tokens += real + [padding_token] * padding
        labels += real[1:] + [0] * (slots - predictions)
        weights += [1.0] * predictions + [0.0] * (slots - predictions)
        positions += range(slots)
        ends.append(len(tokens))
    counts = StepCounts(
        packs=len(packs),
        sequences=len(sequences),
        tokens=sum(map(len, sequences)),
        targets=sum(len(sequence) - 1 for sequence in sequences),
    )
    batch = PackedBatch(
        tokens=torch.tensor(tokens),
        position_ids=torch.tensor(positions),
        token_type_ids=torch.zeros(len(tokens), dtype=torch.int64),
        cu_seqlens=torch.tensor(ends + [len(tokens)] * _EMPTY_SEGMENTS, dtype=torch.int32),
        max_sequence_length=max_sequence_length,
        row_slots={"packed": row_slots, "padded": max_sequence_length}.get(layout) or len(tokens),
        position_rows=max_sequence_length,
        targets={"next_token": SlotTargets(labels=torch.tensor(labels), weights=torch.tensor(weights))},
        step_counts=counts,
        local_counts=counts,
        sequence_ids=torch.arange(len(sequences)),
        source_tokens=(counts.tokens,),
        squared_lengths=sum(len(sequence) ** 2 for sequence in sequences),
        pairs_within=total_pairs_within(np.array([len(sequence) for sequence in sequences]), windows),
        cost=0.0,
        order_hash=0,
    )
    return batch, spans


def random_sequences(lengths: Sequence[int], *, vocabulary_size: int, seed: int = 0) -> list[list[int]]:
    """Returns token lists of the given lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocabulary_size, (length,), generator=generator).tolist() for length in lengths]
