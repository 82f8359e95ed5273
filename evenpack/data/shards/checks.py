"""Checks of a shard's rows: whether they are masked pairs, and whether they meet the limits of `prepare`.

Shapes: K = sequences, T = their tokens, M = masked tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Int64, Integer

from evenpack.data.shards.masked_sequences import MaskedSequences
from evenpack.data.tokenizers.tokenizer import PairTokens
from evenpack.errors import DataError


@dataclass(frozen=True, kw_only=True, eq=False)
class RawSequences:
    """K sequences as read from a shard, with their rows."""

    path: Path
    rows: Int64[np.ndarray, " K"]
    tokens: Integer[np.ndarray, " T"]
    lengths: Int64[np.ndarray, " K"]
    segment_ids: Integer[np.ndarray, " T"]
    next_sentence_labels: Int64[np.ndarray, " K"]
    mask_counts: Int64[np.ndarray, " K"]
    mask_places: Int64[np.ndarray, " M"]
    mask_labels: Int64[np.ndarray, " M"]

    def place(self, sequence: int) -> str:
        """Returns a description of file and row, and of the sequence in a row of several."""
        row = self.rows[sequence]
        before = np.searchsorted(self.rows, row)
        is_alone = np.count_nonzero(self.rows == row) == 1
        part = "" if is_alone else f", sequence {sequence - before}"
        return f"{self.path}, row {row} (from 0){part}"


@dataclass(frozen=True, kw_only=True)
class RowLimits:
    """The limits that a run's recipe and vocabulary set for a row."""

    max_sequence_length: int
    max_predictions: int
    vocabulary_size: int
    pair_tokens: PairTokens | None
    """Special tokens of pairs; None where only the vocabulary's size is known."""


def checked(raw: RawSequences) -> MaskedSequences:
    """Returns the sequences, if each is a masked pair.

    Raises: DataError naming file and row of an empty sequence, segments that are not zeros followed by ones, a label
    that is neither 0 nor 1, or masked positions that do not ascend, are [CLS]'s, or are beyond the sequence's end.
    """
    if (bad := _first(raw.lengths < 1)) is not None:
        raise DataError(f"{raw.place(bad)}: it holds no token")
    starts = np.cumsum(raw.lengths) - raw.lengths
    first_lengths = np.add.reduceat(raw.segment_ids == 0, starts, dtype=np.int64) if len(starts) else raw.lengths
    place_in_sequence = np.arange(len(raw.tokens)) - np.repeat(starts, raw.lengths)
    expected_segments = place_in_sequence >= np.repeat(first_lengths, raw.lengths)
    if (bad := _first_part(raw.segment_ids != expected_segments, raw.lengths)) is not None:
        raise DataError(f"{raw.place(bad)}: segment_ids is not zeros followed by ones")
    labels = raw.next_sentence_labels
    if (bad := _first((labels != 0) & (labels != 1))) is not None:
        raise DataError(f"{raw.place(bad)}: next_sentence_labels is {labels[bad]}, expected 0 or 1")
    _check_places(raw)
    return MaskedSequences(
        tokens=raw.tokens,
        lengths=raw.lengths,
        first_segment_lengths=first_lengths,
        next_sentence_labels=labels,
        mask_counts=raw.mask_counts,
        mask_places=raw.mask_places,
        mask_labels=raw.mask_labels,
    )


def check_limits(sequences: MaskedSequences, limits: RowLimits, place: Callable[[int], str]) -> None:
    """Checks the limits of some sequences.

    Raises: DataError naming file and row of the first sequence that is too long, has more masks than the cap, holds
    an id outside the vocabulary, or does not begin and end with the vocabulary's [CLS] and [SEP].
    """
    lengths, counts = sequences.lengths, sequences.mask_counts
    if (bad := _first(lengths > limits.max_sequence_length)) is not None:
        raise DataError(
            f"{place(bad)}: it has {lengths[bad]} tokens, and data.recipe.max_sequence_length is "
            f"{limits.max_sequence_length}"
        )
    if (bad := _first(counts > limits.max_predictions)) is not None:
        raise DataError(
            f"{place(bad)}: it has {counts[bad]} masked tokens, and data.recipe.max_predictions is "
            f"{limits.max_predictions}"
        )
    for name, ids, parts in (
        ("input_ids", sequences.tokens, lengths),
        ("masked_lm_ids", sequences.mask_labels, counts),
    ):
        outside = (ids < 0) | (ids >= limits.vocabulary_size)
        if (bad := _first_part(outside, parts)) is not None:
            raise DataError(
                f"{place(bad)}: {name} has token id {ids[outside][0]}, and the vocabulary has "
                f"{limits.vocabulary_size} entries: give the vocabulary that the shards were made with"
            )
    if limits.pair_tokens is not None:
        _check_ends(sequences, limits.pair_tokens, place)


def _check_ends(sequences: MaskedSequences, special: PairTokens, place: Callable[[int], str]) -> None:
    ends = sequences.ends
    for role, wanted, places in (
        ("begins with [CLS]", special.classification_id, ends - sequences.lengths),
        ("ends with [SEP]", special.separator_id, ends - 1),
    ):
        found = sequences.tokens[places]
        if (bad := _first(found != wanted)) is not None:
            raise DataError(
                f"{place(bad)}: a pair {role}, which is {wanted} in this run's vocabulary, found {found[bad]}: give "
                "the vocabulary that the shards were made with"
            )


def _check_places(raw: RawSequences) -> None:
    """Checks masked positions; position 0, which pads shards of fixed width, is [CLS]'s, which is never masked."""
    places, counts = raw.mask_places, raw.mask_counts
    outside = (places < 1) | (places >= np.repeat(raw.lengths, counts))
    if (bad := _first_part(outside, counts)) is not None:
        raise DataError(
            f"{raw.place(bad)}: masked_lm_positions has {places[outside][0]}, counted from the sequence's beginning; "
            f"the sequence has {raw.lengths[bad]} tokens, the first of which is never masked"
        )
    same_sequence = np.diff(np.repeat(np.arange(len(counts)), counts)) == 0
    falls = np.append(False, (np.diff(places) <= 0) & same_sequence)[: len(places)]
    if (bad := _first_part(falls, counts)) is not None:
        raise DataError(f"{raw.place(bad)}: masked_lm_positions does not ascend")


def _first(wrong: Bool[np.ndarray, " K"]) -> int | None:
    (bad,) = np.nonzero(wrong)
    return int(bad[0]) if len(bad) else None


def _first_part(wrong: Bool[np.ndarray, " N"], parts: Int64[np.ndarray, " K"]) -> int | None:
    """Returns the first of K parts, into which N values are divided, that has a wrong value."""
    bad = _first(wrong)
    return None if bad is None else int(np.searchsorted(np.cumsum(parts), bad, side="right"))
