"""The masked tokens that a model has to predict: drawn for many sequences at once, each by a key of its own.

A sequence's masks are a pure function of its key, its tokens and the settings. They depend neither on the other
sequences nor on ranks, packs or resume, and their number is a function of the sequence's length alone, so that every
rank can count the targets of a step without reading a token.

Each sequence's ordinary tokens are put into a random order, and the first of them are masked. With `whole_words` the
words are put into a random order, each with its tokens concatenated; so at most the last masked word is cut.

Source: Devlin et al., "BERT" (2019), section 3.1 and appendix A.1. There a random token may be a special one; here it
never is.

Shapes: N = sequences, T = their tokens, M = masked tokens.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int64, Integer, UInt64

from evenpack.data.keys import derive_key, hash64
from evenpack.data.ranges import cut, ranges
from evenpack.data.recipes import MaskingConfig
from evenpack.data.tokenizers.special_tokens import MaskingVocabulary

SPECIAL_TOKENS_OF_A_PAIR = 3
"""Special tokens of a pair: [CLS] A [SEP] B [SEP]."""
SPECIAL_TOKENS_OF_A_DOCUMENT = 2
"""Special tokens of a document: [CLS] text [SEP]; a piece of one has fewer."""

_CHUNK_TOKENS = 1 << 15
"""Tokens processed together: their arrays stay in a core's second-level cache."""
_LONGEST = 1 << 16

# A token's sort key is one number: 16 bits of its sequence, 1 for special tokens, which come last, 31 random bits,
# 16 of its position. Numbers are sorted faster than indices of them, and need no gathering afterwards.
_SEQUENCE_SHIFT = np.uint64(48)
_SPECIAL_SHIFT = np.uint64(47)
_DRAWN_SHIFT = np.uint64(17)
_PLACE = np.uint64((1 << 16) - 1)
_NOT_PLACE = ~_PLACE

_REPLACEMENT = np.uint64(0xD1B54A32D192ED03)
"""Purpose of a key: separates a sequence's draws of replacements from the draws of its order."""
_HALF = np.uint64(32)
_LOW_HALF = np.uint64((1 << 32) - 1)


@dataclass(frozen=True, kw_only=True, eq=False)
class MaskedTokens:
    """The inputs that the model sees and the tokens that it has to predict."""

    tokens: Integer[np.ndarray, " T"]
    positions: Int64[np.ndarray, " M"]
    """Ascending positions in `tokens` that count in the loss."""
    labels: Integer[np.ndarray, " M"]
    """Original tokens at these positions."""
    counts: Int64[np.ndarray, " N"]
    """Masked tokens of each sequence."""


def masked_count(
    lengths: Integer[np.ndarray, " N"],
    config: MaskingConfig,
    special_tokens: int | Int64[np.ndarray, " N"] = SPECIAL_TOKENS_OF_A_PAIR,
) -> Int64[np.ndarray, " N"]:
    """Returns how many tokens of sequences of these lengths are masked: the rounded fraction, from one to the maximum.

    A sequence too short for that has all its tokens masked except `special_tokens`, the most that it can have.
    """
    counts = np.rint(config.share * lengths).astype(np.int64)
    np.maximum(counts, 1, out=counts)
    np.minimum(counts, config.max_predictions, out=counts)
    np.minimum(counts, lengths - special_tokens, out=counts)
    return np.maximum(counts, 0, out=counts)


def masking_keys(
    seed: int,
    epochs: Int64[np.ndarray, " N"],
    source_keys: UInt64[np.ndarray, " N"],
    sequence_ids: Int64[np.ndarray, " N"],
) -> UInt64[np.ndarray, " N"]:
    """Returns a key for each sequence in its epoch; `source_keys` are any numbers that identify the sources."""
    return derive_key(seed, epochs.astype(np.uint64), source_keys, sequence_ids.astype(np.uint64))


def mask_sequences(
    tokens: Integer[np.ndarray, " T"],
    offsets: Int64[np.ndarray, " N_plus_1"],
    sequence_keys: UInt64[np.ndarray, " N"],
    config: MaskingConfig,
    vocabulary: MaskingVocabulary,
    *,
    special_tokens: int | Int64[np.ndarray, " N"] = SPECIAL_TOKENS_OF_A_PAIR,
) -> MaskedTokens:
    """Masks N sequences that are concatenated; `offsets` are their bounds. `tokens` is not changed.

    `sequence_keys` come from `masking_keys`: keys that differ little would give similar draws. `special_tokens` is as
    in `masked_count`.

    Raises: ValueError for a sequence longer than 65,536 tokens, or with fewer ordinary tokens than are to be masked.
    """
    lengths = offsets[1:] - offsets[:-1]
    if lengths.max(initial=0) > _LONGEST:
        raise ValueError(
            f"sequence {lengths.argmax()} has {lengths.max()} tokens, masks are drawn for {_LONGEST} at most"
        )
    counts = masked_count(lengths, config, special_tokens)
    masked = tokens.copy()
    parts = []
    for first, last in _chunks(offsets):
        start = offsets[first]
        positions = _mask_chunk(
            masked[start : offsets[last]],
            offsets[first : last + 1] - start,
            sequence_keys[first:last],
            counts[first:last],
            config=config,
            vocabulary=vocabulary,
        )
        parts.append(positions + start)
    positions = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return MaskedTokens(tokens=masked, positions=positions, labels=tokens[positions], counts=counts)


def _chunks(offsets: Int64[np.ndarray, " N_plus_1"]) -> list[tuple[int, int]]:
    """Yields ranges of sequences of about `_CHUNK_TOKENS`, and of no more sequences; at least one range.

    The masks do not depend on them.
    """
    sequences = len(offsets) - 1
    if offsets[-1] - offsets[0] + sequences <= _CHUNK_TOKENS:
        return [(0, sequences)]
    return list(cut(offsets + np.arange(sequences + 1), _CHUNK_TOKENS))


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
    starts = offsets[:-1]
    order = _random_order(tokens, offsets, keys, vocabulary, whole_words=config.whole_words)
    taken = order[ranges(starts, counts)]
    positions: Int64[np.ndarray, " M"] = starts.repeat(counts) + (taken & _PLACE).view(np.int64)
    positions.sort()
    originals = tokens[positions]
    if vocabulary.special[originals].any():
        _refuse_short_of_tokens(tokens, offsets, counts, vocabulary)
    draws = hash64(((keys ^ _REPLACEMENT) - starts.view(np.uint64)).repeat(counts) + positions.view(np.uint64))
    tokens[positions] = _replace(originals, draws, config, vocabulary)
    return positions


def _random_order(
    tokens: Integer[np.ndarray, " T"],
    offsets: Int64[np.ndarray, " N_plus_1"],
    keys: UInt64[np.ndarray, " N"],
    vocabulary: MaskingVocabulary,
    *,
    whole_words: bool,
) -> UInt64[np.ndarray, " T"]:
    """Returns the tokens of each sequence in random order, special ones last.

    The lowest 16 bits are a token's position.
    """
    starts, lengths = offsets[:-1], offsets[1:] - offsets[:-1]
    firsts = starts.view(np.uint64)
    positions = np.arange(len(tokens), dtype=np.uint64)
    special = vocabulary.special[tokens]
    draws = hash64((keys - firsts).repeat(lengths) + positions)
    if whole_words:
        draws = draws[_word_starts(vocabulary.continues[tokens], starts)]
    draws >>= _DRAWN_SHIFT
    draws &= _NOT_PLACE
    draws |= special.astype(np.uint64) << _SPECIAL_SHIFT
    draws += ((np.arange(len(keys), dtype=np.uint64) << _SEQUENCE_SHIFT) - firsts).repeat(lengths) + positions
    draws.sort()
    return draws


def _word_starts(continues: Bool[np.ndarray, " T"], starts: Int64[np.ndarray, " N"]) -> Int64[np.ndarray, " T"]:
    """Returns the start of each token's word, or the special token before it, whose draw is otherwise unused."""
    begins = np.where(continues, 0, np.arange(len(continues)))
    filled = starts[starts < len(continues)]
    begins[filled] = filled
    return np.maximum.accumulate(begins, out=begins)


def _refuse_short_of_tokens(
    tokens: Integer[np.ndarray, " T"],
    offsets: Int64[np.ndarray, " N_plus_1"],
    counts: Int64[np.ndarray, " N"],
    vocabulary: MaskingVocabulary,
) -> None:
    before = np.append(0, np.cumsum(~vocabulary.special[tokens]))
    found = np.diff(before[offsets])
    short = np.flatnonzero(found < counts)[0]
    raise ValueError(
        f"a sequence has {found[short]} ordinary tokens, of which {counts[short]} are to be masked; "
        f"expected a pair with no more than {SPECIAL_TOKENS_OF_A_PAIR} special tokens, or a document that has them at "
        "its ends alone"
    )


def _replace(
    tokens: Integer[np.ndarray, " M"],
    draws: UInt64[np.ndarray, " M"],
    config: MaskingConfig,
    vocabulary: MaskingVocabulary,
) -> Integer[np.ndarray, " M"]:
    """Replaces by [MASK], a random ordinary token, or the token itself: a draw's upper half chooses which."""
    lots = draws >> _HALF
    ordinary = vocabulary.ordinary_ids
    chosen = (draws & _LOW_HALF) * np.uint64(len(ordinary)) >> _HALF
    random = ordinary[chosen.view(np.int64)].astype(tokens.dtype)
    replaced = np.where(lots < _threshold(config.mask_share + config.random_share), random, tokens)
    replaced[lots < _threshold(config.mask_share)] = vocabulary.mask_id
    return replaced


def _threshold(share: float) -> np.uint64:
    """Returns the threshold below which a draw of 32 bits is with this probability."""
    return np.uint64(round(share * 2**32))
