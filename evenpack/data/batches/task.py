"""The content of a batch, and the predictions that it asks of the model.

Shapes: M = sequences of the batch, K = values given.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Int64, Integer

from evenpack.batch import CausalTargets, MaskedTargets
from evenpack.data.batches.placement import Placement
from evenpack.data.order.selection import PackedSource
from evenpack.data.sequences import SentencePairsView
from evenpack.data.sequences.masking import MaskedTokens
from evenpack.data.sequences.view import PaddingCounts
from evenpack.errors import DataError


@dataclass(frozen=True, kw_only=True, eq=False)
class SequenceContent:
    """The sequences of a batch, in slot order."""

    tokens: Int64[np.ndarray, " tokens"]
    """Tokens of all sequences, concatenated."""
    lengths: Int64[np.ndarray, " M"]
    sources: Int64[np.ndarray, " M"]
    """Index into the batch's sources."""
    epochs: Int64[np.ndarray, " M"]
    """Epoch of each sequence's source."""
    sequence_ids: Int64[np.ndarray, " M"]
    pack_sizes: Int64[np.ndarray, " M"]
    """Number of sequences in each one's pack."""
    padding: PaddingCounts
    """Padding inside each sequence."""
    left_out: Bool[np.ndarray, " tokens"] | None
    """Tokens that are not predicted because they are padding; None: none."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """The inputs that a batch shows the model, and its targets."""

    tokens: Int64[np.ndarray, " tokens"]
    """Tokens as the model sees them, in the order of the content."""
    token_types: Int64[np.ndarray, " tokens"]
    targets: CausalTargets | MaskedTargets
    target_count: int


_SIZE_MULTIPLE = 64


def rounded_size(count: int) -> int:
    """Returns the size of an index array that follows its micro-batch: few different sizes, suited to tensor cores."""
    return -(-count // _SIZE_MULTIPLE) * _SIZE_MULTIPLE


def beyond_capacity(name: str, found: int, expected: int) -> str:
    """Returns the message about a micro-batch that does not fit into the fixed sizes of a run's batches."""
    return (
        f"a micro-batch has {found} {name}, but no step of the run was to have more than {expected} in one: the "
        "prepared data has changed since the run started; start it again, and prepare the data again if this repeats"
    )


def masked_task(
    content: SequenceContent,
    placement: Placement,
    sources: Sequence[PackedSource],
    masked: MaskedTokens,
    *,
    reduction: Literal["token", "sequence"],
    next_sentence_reduction: Literal["sequence", "pack"],
    max_sequences: int,
    max_targets: int | None,
) -> Task:
    """Returns the task of masked tokens and next sentences; `masked` is the masked form of the content's tokens.

    `max_targets` None: as many as this batch has, padded to a `rounded_size`.

    Raises: DataError for more targets than that.
    """
    max_targets = rounded_size(len(masked.positions)) if max_targets is None else max_targets
    if len(masked.positions) > max_targets:
        raise DataError(beyond_capacity("targets", len(masked.positions), max_targets))
    offsets = np.concatenate([[0], np.cumsum(content.lengths)])
    first_lengths, labels = _pair_columns(content, sources)
    token_of_sequence = np.arange(len(content.tokens)) - np.repeat(offsets[:-1], content.lengths)
    weights = np.ones(len(masked.positions), dtype=np.float32)
    if reduction == "sequence":
        weights /= np.repeat(masked.counts, masked.counts)
    sequence_weights = np.ones(len(labels), dtype=np.float32)
    if next_sentence_reduction == "pack":
        sequence_weights /= content.pack_sizes
    targets = MaskedTargets(
        positions=_filled(placement.slot_of_token[masked.positions], max_targets),
        labels=_filled(masked.labels, max_targets),
        weights=_filled(weights, max_targets),
        sequence_starts=_filled(placement.slot_of_token[offsets[:-1]], max_sequences),
        next_sentence_labels=_filled(labels, max_sequences),
        sequence_weights=_filled(sequence_weights, max_sequences),
    )
    return Task(
        tokens=masked.tokens,
        token_types=(token_of_sequence >= np.repeat(first_lengths, content.lengths)).astype(np.int64),
        targets=targets,
        target_count=len(masked.positions),
    )


def _pair_columns(
    content: SequenceContent, sources: Sequence[PackedSource]
) -> tuple[Int64[np.ndarray, " M"], Int64[np.ndarray, " M"]]:
    """Returns the lengths of the first halves, and the next-sentence labels."""
    first_lengths = np.empty(len(content.lengths), dtype=np.int64)
    labels = np.empty(len(content.lengths), dtype=np.int64)
    for index, source in enumerate(sources):
        members = content.sources == index
        view = source.view
        assert isinstance(view, SentencePairsView), "checked when the collator was made"
        chosen = content.sequence_ids[members]
        first_lengths[members] = view.first_segment_lengths[chosen]
        labels[members] = view.next_sentence_labels[chosen]
    return first_lengths, labels


def _filled(values: Integer[np.ndarray, " K"] | np.ndarray, size: int) -> torch.Tensor:
    """Returns `values` followed by zeros."""
    result = np.zeros(size, dtype=np.float32 if values.dtype.kind == "f" else np.int64)
    result[: len(values)] = values
    return torch.from_numpy(result)
