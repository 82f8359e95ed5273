"""Which tokens BERT has to guess: drawn for many sequences at once, each by a key of its own.

A sequence's masks are a pure function of its key, its tokens and the settings. They depend neither on the sequences
beside it nor on ranks, packs or resume, and how many there are is a function of the sequence's length alone, so that
every rank can count the targets of a step without reading a token.

Each sequence is cut into units: its tokens, or, with `whole_words`, its words. The units are taken in a random order
until their tokens make up the count; the last one is cut where it would exceed it.

Source: Devlin et al., "BERT" (2019), section 3.1 and appendix A.1. There a random token may be a special one; here it
never is.

Shapes: N = sequences, T = their tokens, U = units, M = masked tokens.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from jaxtyping import Bool, Int64, Integer, UInt64

from evenpack.data.masking_config import MaskingConfig
from evenpack.data.permutation import derive_key, hash64

SPECIAL_TOKENS_OF_A_PAIR = 3
"""[CLS] A [SEP] B [SEP]."""

_ORDER = 0
_REPLACEMENT = 1
_CHOICE = 2
"""What a draw is for."""
_CHUNK_TOKENS = 1 << 15
"""Tokens worked on together: the arrays of them stay in a core's second-level cache."""
_LONGEST = 1 << 16
_PLACE_BITS = np.uint64(16)
_DRAW_BITS = np.uint64(32)
_LOW_PLACE = np.uint64((1 << 16) - 1)
_FLOAT_BITS = np.uint64(11)


@dataclass(frozen=True, kw_only=True, eq=False)
class MaskingVocabulary:
    """What of the vocabulary counts for masks."""

    mask_id: int
    special: Bool[np.ndarray, " vocabulary"]
    """Never masked and never drawn: [CLS], [SEP], [MASK], [PAD]."""
    continues: Bool[np.ndarray, " vocabulary"]
    """Pieces that go on with the word before."""

    def __post_init__(self) -> None:
        if self.special.all():
            raise ValueError(
                f"all {len(self.special)} entries of the vocabulary are special tokens: none could be drawn"
            )

    @cached_property
    def ordinary_ids(self) -> Int64[np.ndarray, " ordinary"]:
        """What a random token is drawn from."""
        return np.flatnonzero(~self.special)


@dataclass(frozen=True, kw_only=True, eq=False)
class MaskedTokens:
    """What the model sees and what it has to guess."""

    tokens: Integer[np.ndarray, " T"]
    positions: Int64[np.ndarray, " M"]
    """Rising places in `tokens` that count in the loss."""
    labels: Integer[np.ndarray, " M"]
    """The tokens that were there."""
    counts: Int64[np.ndarray, " N"]
    """Masked tokens of each sequence."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Units:
    """U tokens or words, sequence by sequence."""

    starts: Int64[np.ndarray, " U"]
    """First token of each."""
    lengths: Int64[np.ndarray, " U"]
    sequences: Int64[np.ndarray, " U"]
    """Which sequence each belongs to."""


def masked_count(lengths: Integer[np.ndarray, " N"], config: MaskingConfig) -> Int64[np.ndarray, " N"]:
    """How many tokens of pairs of these lengths are masked: the share, rounded, at least one, at most the maximum.

    A pair too short for that has all its tokens masked but the three special ones.
    """
    wanted = np.maximum(np.rint(config.share * lengths).astype(np.int64), 1)
    limits = np.minimum(lengths - SPECIAL_TOKENS_OF_A_PAIR, config.max_predictions)
    return np.clip(wanted, 0, np.maximum(limits, 0))


def masking_keys(
    seed: int,
    epochs: Int64[np.ndarray, " N"],
    source_keys: UInt64[np.ndarray, " N"],
    sequence_ids: Int64[np.ndarray, " N"],
) -> UInt64[np.ndarray, " N"]:
    """A key for each sequence in its epoch; `source_keys` are any numbers that tell sources apart."""
    return derive_key(seed, epochs.astype(np.uint64), source_keys, sequence_ids.astype(np.uint64))


def mask_sequences(
    tokens: Integer[np.ndarray, " T"],
    offsets: Int64[np.ndarray, " N_plus_1"],
    sequence_keys: UInt64[np.ndarray, " N"],
    config: MaskingConfig,
    vocabulary: MaskingVocabulary,
) -> MaskedTokens:
    """Masks N sequences that lie behind one another; `offsets` are their bounds. `tokens` stays as it is.

    Raises: ValueError for a sequence longer than 65,536 tokens, or with fewer ordinary tokens than are to be masked.
    """
    counts = masked_count(np.diff(offsets), config)
    masked = tokens.copy()
    parts = [np.zeros(0, dtype=np.int64)]
    for first, last in _chunks(offsets):
        chunk = masked[offsets[first] : offsets[last]]
        positions = _mask_chunk(
            chunk,
            offsets[first : last + 1] - offsets[first],
            sequence_keys[first:last],
            counts[first:last],
            config=config,
            vocabulary=vocabulary,
        )
        parts.append(positions + offsets[first])
    positions = np.concatenate(parts)
    return MaskedTokens(tokens=masked, positions=positions, labels=tokens[positions], counts=counts)


def _chunks(offsets: Int64[np.ndarray, " N_plus_1"]) -> list[tuple[int, int]]:
    """Ranges of sequences of `_CHUNK_TOKENS` or a little more; what is drawn does not depend on them."""
    lengths = np.diff(offsets)
    if len(lengths) and lengths.max() > _LONGEST:
        raise ValueError(
            f"sequence {lengths.argmax()} has {lengths.max()} tokens, masks are drawn for {_LONGEST} at most"
        )
    (firsts,) = np.nonzero(np.diff((offsets[:-1] - offsets[0]) // _CHUNK_TOKENS, prepend=-1))
    bounds = [*firsts.tolist(), len(lengths)]
    return list(pairwise(bounds))


def _mask_chunk(
    tokens: Integer[np.ndarray, " T"],
    offsets: Int64[np.ndarray, " N_plus_1"],
    keys: UInt64[np.ndarray, " N"],
    counts: Int64[np.ndarray, " N"],
    *,
    config: MaskingConfig,
    vocabulary: MaskingVocabulary,
) -> Int64[np.ndarray, " M"]:
    """Masks `tokens` in place. Returns: the positions."""
    units = _units(tokens, offsets, config, vocabulary)
    _refuse_short_of_tokens(units, counts)
    order, taken = _take(units, offsets[:-1], keys, counts)
    positions = np.repeat(units.starts[order] - (np.cumsum(taken) - taken), taken) + np.arange(taken.sum())
    positions.sort()
    sequences = np.repeat(np.arange(len(keys)), counts)
    token_keys = keys[sequences] + (positions - offsets[sequences]).astype(np.uint64)
    tokens[positions] = _replace(tokens[positions], token_keys, config, vocabulary)
    return positions


def _units(
    tokens: Integer[np.ndarray, " T"],
    offsets: Int64[np.ndarray, " N_plus_1"],
    config: MaskingConfig,
    vocabulary: MaskingVocabulary,
) -> _Units:
    """What can be masked, in order."""
    ordinary = ~vocabulary.special[tokens]
    sequence_of_token = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    if not config.whole_words:
        (starts,) = np.nonzero(ordinary)
        return _Units(starts=starts, lengths=np.ones_like(starts), sequences=sequence_of_token[starts])
    goes_on = vocabulary.continues[tokens] & ordinary
    goes_on[1:] &= ordinary[:-1]
    goes_on[offsets[:-1][offsets[:-1] < len(tokens)]] = False
    (starts,) = np.nonzero(ordinary & ~goes_on)
    (ends,) = np.nonzero(ordinary & ~np.append(goes_on[1:], np.zeros(min(len(tokens), 1), dtype=np.bool_)))
    return _Units(starts=starts, lengths=ends + 1 - starts, sequences=sequence_of_token[starts])


def _refuse_short_of_tokens(units: _Units, counts: Int64[np.ndarray, " N"]) -> None:
    found = np.bincount(units.sequences, weights=units.lengths, minlength=len(counts)).astype(np.int64)
    short = np.flatnonzero(found < counts)
    if len(short):
        raise ValueError(
            f"a sequence has {found[short[0]]} ordinary tokens, of which {counts[short[0]]} are to be masked; "
            f"expected a pair with no more than {SPECIAL_TOKENS_OF_A_PAIR} special tokens"
        )


def _take(
    units: _Units,
    sequence_starts: Int64[np.ndarray, " N"],
    keys: UInt64[np.ndarray, " N"],
    counts: Int64[np.ndarray, " N"],
) -> tuple[Int64[np.ndarray, " U"], Int64[np.ndarray, " U"]]:
    """Units in each sequence's random order, and how many tokens of each are masked."""
    places = (units.starts - sequence_starts[units.sequences]).astype(np.uint64)
    draws = hash64(hash64(keys ^ np.uint64(_ORDER))[units.sequences] + places) >> _DRAW_BITS
    sort_keys = (units.sequences.astype(np.uint64) << (_DRAW_BITS + _PLACE_BITS)) | (draws << _PLACE_BITS) | places
    order = np.argsort(sort_keys)
    lengths = units.lengths[order]
    before = np.cumsum(lengths) - lengths
    per_sequence = np.bincount(units.sequences, minlength=len(counts))
    firsts = np.cumsum(per_sequence) - per_sequence
    filled = per_sequence > 0
    origins = np.zeros_like(counts)
    origins[filled] = before[firsts[filled]]
    left = counts[units.sequences] - (before - origins[units.sequences])
    return order, np.clip(left, 0, lengths)


def _replace(
    tokens: Integer[np.ndarray, " M"],
    token_keys: UInt64[np.ndarray, " M"],
    config: MaskingConfig,
    vocabulary: MaskingVocabulary,
) -> Integer[np.ndarray, " M"]:
    """[MASK], a random ordinary token, or the token itself."""
    lot = (hash64(derive_key(_REPLACEMENT, token_keys)) >> _FLOAT_BITS) * 2.0**-53
    ordinary = vocabulary.ordinary_ids
    drawn = (derive_key(_CHOICE, token_keys) >> _DRAW_BITS) * np.uint64(len(ordinary)) >> _DRAW_BITS
    random = np.where(
        lot < config.mask_share + config.random_share, ordinary[drawn.astype(np.int64)].astype(tokens.dtype), tokens
    )
    return np.where(lot < config.mask_share, tokens.dtype.type(vocabulary.mask_id), random)
