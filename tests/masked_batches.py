"""Builds batches of masked sentence pairs by hand, so that model tests do not depend on masking and the collator."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from batches import PADDING_TOKEN, Layout
from torch import nn

from evenpack.batch import ChosenTargets, PackedBatch, Targets
from evenpack.losses import StepCounts
from evenpack.visible_pairs import total_pairs_within

FIRST_TOKEN = 1
MASK_TOKEN = 2

_EMPTY_SEGMENTS = 2
_UNUSED = 3


@dataclass(frozen=True, kw_only=True)
class MaskedPair:
    """One sequence as model input, and its original tokens."""

    tokens: list[int]
    token_types: list[int]
    masked: dict[int, int]
    """Position in the sequence -> the token that stood there."""
    next_sentence_label: int


def random_pairs(lengths: Sequence[int], *, vocabulary_size: int, seed: int = 0) -> list[MaskedPair]:
    """Returns pairs of the given lengths; 15 % of the tokens are masked, at least one, never the first."""
    generator = torch.Generator().manual_seed(seed)
    pairs = []
    for length in lengths:
        tokens = [FIRST_TOKEN, *torch.randint(4, vocabulary_size, (length - 1,), generator=generator).tolist()]
        behind_first = (1 + torch.randperm(length - 1, generator=generator)).tolist()
        masked = {position: tokens[position] for position in sorted(behind_first[: max(1, round(0.15 * length))])}
        for position in masked:
            tokens[position] = MASK_TOKEN
        half = length // 2
        label = int(torch.randint(2, (), generator=generator))
        types = [0] * half + [1] * (length - half)
        pairs.append(MaskedPair(tokens=tokens, token_types=types, masked=masked, next_sentence_label=label))
    return pairs


@torch.no_grad()
def roughen(model: nn.Module, deviation: float = 0.15) -> None:
    """Adds noise to all weights, because initial ones are too small to have an effect."""
    generator = torch.Generator().manual_seed(11)
    for parameter in model.parameters():
        parameter.add_(deviation * torch.randn(parameter.shape, generator=generator))


def build_masked_batch(
    packs: Sequence[Sequence[MaskedPair]],
    layout: Layout,
    *,
    max_sequence_length: int,
    pack_length: int | None = None,
    max_targets: int | None = None,
    max_sequences: int | None = None,
    mlm_reduction: Literal["token", "sequence"] = "token",
    windows: Sequence[int] = (),
) -> tuple[PackedBatch, list[slice]]:
    """Returns the packs' sequences in one layout, and the slots of each, in order.

    Padding is never part of a sequence's segment: attention looks both ways.

    Args:
        pack_length: slots of a row of the packed layout; None: as many as the fullest pack needs.
        max_targets: size of the arrays over masked tokens; None: a few more than there are. `max_sequences` likewise.
        windows: windows whose pairs are counted.
    """
    pairs = [pair for pack in packs for pair in pack]
    row_slots = pack_length or max(sum(len(pair.tokens) for pair in pack) for pack in packs)
    tokens, types, positions, ends, spans = [], [], [], [0], []

    def add_segment(segment_tokens: list[int], segment_types: list[int]) -> None:
        tokens.extend(segment_tokens)
        types.extend(segment_types)
        positions.extend(range(len(segment_tokens)))
        ends.append(len(tokens))

    def add_padding(slots: int) -> None:
        while slots > 0:
            piece = min(slots, max_sequence_length)
            add_segment([PADDING_TOKEN] * piece, [0] * piece)
            slots -= piece

    for pack in packs:
        for pair in pack:
            spans.append(slice(len(tokens), len(tokens) + len(pair.tokens)))
            add_segment(pair.tokens, pair.token_types)
            if layout == "padded":
                add_padding(max_sequence_length - len(pair.tokens))
        if layout == "packed":
            add_padding(row_slots - sum(len(pair.tokens) for pair in pack))
    counts = StepCounts(
        packs=len(packs),
        sequences=len(pairs),
        tokens=sum(len(pair.tokens) for pair in pairs),
        targets=sum(len(pair.masked) for pair in pairs),
    )
    batch = PackedBatch(
        tokens=torch.tensor(tokens),
        position_ids=torch.tensor(positions),
        token_type_ids=torch.tensor(types),
        cu_seqlens=torch.tensor(ends + [len(tokens)] * _EMPTY_SEGMENTS, dtype=torch.int32),
        max_sequence_length=max_sequence_length,
        row_slots={"packed": row_slots, "padded": max_sequence_length}.get(layout) or len(tokens),
        position_rows=max_sequence_length,
        targets=_targets(
            pairs,
            [span.start for span in spans],
            max_targets=max_targets or counts.targets + _UNUSED,
            max_sequences=max_sequences or counts.sequences + _UNUSED,
            mlm_reduction=mlm_reduction,
        ),
        step_counts=counts,
        local_counts=counts,
        sequence_ids=torch.tensor(_filled(list(range(len(pairs))), max_sequences or counts.sequences + _UNUSED, -1)),
        source_tokens=(counts.tokens,),
        squared_lengths=sum(len(pair.tokens) ** 2 for pair in pairs),
        pairs_within=total_pairs_within(np.array([len(pair.tokens) for pair in pairs]), windows),
        cost=0.0,
        order_hash=0,
    )
    return batch, spans


def _targets(
    pairs: list[MaskedPair], starts: list[int], *, max_targets: int, max_sequences: int, mlm_reduction: str
) -> dict[str, Targets]:
    positions = [start + position for pair, start in zip(pairs, starts, strict=True) for position in pair.masked]
    labels = [label for pair in pairs for label in pair.masked.values()]
    weights = [1.0 if mlm_reduction == "token" else 1.0 / len(pair.masked) for pair in pairs for _ in pair.masked]
    next_sentence_labels = [pair.next_sentence_label for pair in pairs]
    return {
        "masked_token": ChosenTargets(
            positions=torch.tensor(_filled(positions, max_targets, 0)),
            labels=torch.tensor(_filled(labels, max_targets, 0)),
            weights=torch.tensor(_filled(weights, max_targets, 0.0)),
        ),
        "next_sentence": ChosenTargets(
            positions=torch.tensor(_filled(starts, max_sequences, 0)),
            labels=torch.tensor(_filled(next_sentence_labels, max_sequences, 0)),
            weights=torch.tensor(_filled([1.0] * len(pairs), max_sequences, 0.0)),
        ),
    }


def _filled(values: list, size: int, filler: float) -> list:
    assert len(values) <= size
    return values + [filler] * (size - len(values))
