"""Masks: as many as the length determines, of the right kinds, and independent of other sequences."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from scipy import stats

from evenpack.data.recipes import MaskingConfig
from evenpack.data.sequences import masking
from evenpack.data.sequences.masking import MaskedTokens, mask_sequences, masked_count, masking_keys
from evenpack.data.tokenizers.special_tokens import MaskingVocabulary

CLS, SEP, MASK, PAD = 2, 3, 4, 0
SPECIAL = (PAD, CLS, SEP, MASK)
SIZE = 500
FIRST_CONTINUATION = 300
"""Ids from here on go on with the word before."""


def vocabulary() -> MaskingVocabulary:
    ids = np.arange(SIZE)
    return MaskingVocabulary(mask_id=MASK, special=np.isin(ids, SPECIAL), continues=ids >= FIRST_CONTINUATION)


def keys_of(seed: int, epoch: int, source: int, ids: np.ndarray) -> np.ndarray:
    return masking_keys(seed, np.full(len(ids), epoch), np.full(len(ids), source, dtype=np.uint64), ids)


def pair(rng: np.random.Generator, length: int) -> np.ndarray:
    """Returns [CLS] A [SEP] B [SEP] of `length` tokens; [UNK] (1) is an ordinary one."""
    tokens = rng.choice(np.setdiff1d(np.arange(SIZE), SPECIAL), length)
    tokens[0], tokens[int(rng.integers(2, length - 2))], tokens[-1] = CLS, SEP, SEP
    return tokens


def pairs(lengths: list[int], *, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [pair(rng, length) for length in lengths]


def joined(sequences: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    offsets = np.concatenate([[0], np.cumsum([len(sequence) for sequence in sequences])]).astype(np.int64)
    return np.concatenate([np.zeros(0, dtype=np.int64), *sequences]), offsets


def mask(sequences: list[np.ndarray], keys: np.ndarray, config: MaskingConfig) -> MaskedTokens:
    return mask_sequences(*joined(sequences), keys, config, vocabulary())


def by_sequence(masked: MaskedTokens, offsets: np.ndarray) -> list[tuple[list[int], list[int], list[int]]]:
    """Returns (tokens, positions, labels) of each sequence."""
    bounds = np.searchsorted(masked.positions, offsets)
    return [
        (
            masked.tokens[start:stop].tolist(),
            (masked.positions[first:last] - start).tolist(),
            masked.labels[first:last].tolist(),
        )
        for start, stop, first, last in zip(offsets[:-1], offsets[1:], bounds[:-1], bounds[1:], strict=True)
    ]


def test_the_count_is_a_function_of_the_length_as_in_berts_data() -> None:
    lengths = np.arange(5, 513)
    expected = [min(76, max(1, round(0.15 * length)), length - 3) for length in lengths.tolist()]
    counts = masked_count(lengths, MaskingConfig())
    assert counts.tolist() == expected
    assert (counts[-1], counts[0], masked_count(np.array([128]), MaskingConfig())[0]) == (76, 1, 19)
    assert masked_count(lengths, MaskingConfig(max_predictions=20)).max() == 20
    assert masked_count(np.array([5, 100]), MaskingConfig(share=1.0, max_predictions=90)).tolist() == [2, 90]
    assert masked_count(np.array([1, 2, 3]), MaskingConfig()).tolist() == [0, 0, 0]


@pytest.mark.parametrize("whole_words", [False, True])
@given(lengths=st.lists(st.integers(5, 70), max_size=12), seed=st.integers(0, 1000), share=st.floats(0.01, 1.0))
@settings(max_examples=60)
def test_masks_are_on_ordinary_tokens_and_the_rest_is_as_it_was(
    whole_words: bool, lengths: list[int], seed: int, share: float
) -> None:
    sequences = pairs(lengths, seed=seed)
    tokens, offsets = joined(sequences)
    before = tokens.copy()
    config = MaskingConfig(share=share, max_predictions=40, whole_words=whole_words)
    masked = mask_sequences(tokens, offsets, keys_of(seed, 1, 2, np.arange(len(lengths))), config, vocabulary())

    np.testing.assert_array_equal(tokens, before)
    np.testing.assert_array_equal(masked.counts, masked_count(np.array(lengths, dtype=np.int64), config))
    sequence_of_mask = np.searchsorted(offsets, masked.positions, side="right") - 1
    np.testing.assert_array_equal(np.bincount(sequence_of_mask, minlength=len(lengths)), masked.counts)
    assert (np.diff(masked.positions) > 0).all()
    np.testing.assert_array_equal(masked.labels, before[masked.positions])
    assert not np.isin(masked.labels, SPECIAL).any()
    untouched = np.setdiff1d(np.arange(len(tokens)), masked.positions)
    np.testing.assert_array_equal(masked.tokens[untouched], before[untouched])


@pytest.mark.parametrize("whole_words", [False, True])
def test_a_sequences_masks_do_not_depend_on_what_lies_beside_it(
    whole_words: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(3)
    sequences = pairs(rng.integers(5, 300, 60).tolist(), seed=4)
    keys = keys_of(1, 2, 3, np.arange(60))
    config = MaskingConfig(whole_words=whole_words)
    together = by_sequence(mask(sequences, keys, config), joined(sequences)[1])
    order = rng.permutation(60)
    shuffled = [sequences[index] for index in order]
    apart = by_sequence(mask(shuffled, keys[order], config), joined(shuffled)[1])
    assert [together[index] for index in order] == apart
    for index in (0, 17, 59):
        alone = mask([sequences[index]], keys[index : index + 1], config)
        assert by_sequence(alone, joined([sequences[index]])[1]) == [together[index]]
    monkeypatch.setattr(masking, "_CHUNK_TOKENS", 500)
    assert by_sequence(mask(sequences, keys, config), joined(sequences)[1]) == together


def test_a_word_does_not_continue_the_previous_sequence() -> None:
    sequences = [np.array([9] * 30), np.array([FIRST_CONTINUATION] * 3 + [9] * 30)] * 20
    keys = keys_of(1, 2, 3, np.arange(40))
    config = MaskingConfig(whole_words=True)
    together = by_sequence(mask(sequences, keys, config), joined(sequences)[1])
    for index in range(40):
        alone = mask([sequences[index]], keys[[index]], config)
        assert by_sequence(alone, joined([sequences[index]])[1]) == [together[index]]


def test_seed_epoch_source_and_sequence_each_draw_other_masks() -> None:
    sequences = pairs([200] * 2)
    sequences[1] = sequences[0]
    ids = np.arange(2)
    drawn = [keys_of(*which, ids) for which in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]]
    places = {
        tuple(found[1])
        for keys in drawn
        for found in by_sequence(mask(sequences, keys, MaskingConfig()), joined(sequences)[1])
    }
    assert len(places) == 8


def test_the_kinds_of_replacement_have_their_shares() -> None:
    sequences = pairs([400] * 1500, seed=6)
    masked = mask(sequences, keys_of(5, 0, 0, np.arange(1500)), MaskingConfig())
    replaced = masked.tokens[masked.positions]
    count = len(replaced)
    ordinary = SIZE - len(SPECIAL)
    is_mask, is_kept = replaced == MASK, replaced == masked.labels
    for found, share in [
        (is_mask.sum(), 0.8),
        (is_kept.sum(), 0.1 + 0.1 / ordinary),
        ((~is_mask & ~is_kept).sum(), 0.1 * (1 - 1 / ordinary)),
    ]:
        low, high = stats.binom.interval(1 - 1e-6, count, share)
        assert low <= found <= high
    drawn = replaced[~is_mask & ~is_kept]
    assert not np.isin(drawn, SPECIAL).any()
    histogram = np.delete(np.bincount(drawn, minlength=SIZE), SPECIAL)
    assert stats.chisquare(histogram).pvalue > 1e-6


@pytest.mark.parametrize("whole_words", [False, True])
def test_every_place_is_masked_equally_often(whole_words: bool) -> None:
    tokens = np.full(43, 10)
    tokens[0], tokens[20], tokens[-1] = CLS, SEP, SEP
    masked = mask([tokens] * 20_000, keys_of(8, 0, 0, np.arange(20_000)), MaskingConfig(whole_words=whole_words))
    found = np.bincount(masked.positions % 43, minlength=43)
    assert found[[0, 20, 42]].sum() == 0
    assert stats.chisquare(np.delete(found, [0, 20, 42])).pvalue > 1e-6
    # Two neighbours are masked together as often as two of 40 drawn without replacement.
    is_masked = np.zeros(43 * 20_000, dtype=bool)
    is_masked[masked.positions] = True
    rows = is_masked.reshape(20_000, 43)
    both = int((rows[:, 5] & rows[:, 6]).sum())
    low, high = stats.binom.interval(1 - 1e-6, 20_000, 6 / 40 * 5 / 39)
    assert low <= both <= high


def sequences_alike(count: int, *, seed: int = 0, epoch: int = 0, whole_words: bool = False) -> MaskedTokens:
    """Returns `count` times the same pair of 103 tokens, of which 15 are masked, with consecutive ids."""
    tokens = np.full(103, 10)
    tokens[0], tokens[51], tokens[-1] = CLS, SEP, SEP
    keys = keys_of(seed, epoch, 0, np.arange(count))
    return mask([tokens] * count, keys, MaskingConfig(whole_words=whole_words))


def rows_of(masked: MaskedTokens, count: int) -> np.ndarray:
    """Returns which of the 103 positions are masked in each sequence."""
    is_masked = np.zeros(103 * count, dtype=bool)
    is_masked[masked.positions] = True
    return is_masked.reshape(count, 103)


def test_what_replaces_a_token_depends_neither_on_its_place_nor_on_its_neighbour() -> None:
    count = 12_000
    masked = sequences_alike(count)
    replaced = masked.tokens[masked.positions]
    kinds = np.where(replaced == MASK, 0, np.where(replaced == 10, 1, 2))
    places = masked.positions % 103
    by_place = np.zeros((103, 3), dtype=np.int64)
    np.add.at(by_place, (places, kinds), 1)
    assert stats.chi2_contingency(by_place[by_place.sum(axis=1) > 0]).pvalue > 1e-6

    beside = np.flatnonzero(np.diff(masked.positions) == 1)
    by_neighbour = np.zeros((3, 3), dtype=np.int64)
    np.add.at(by_neighbour, (kinds[beside], kinds[beside + 1]), 1)
    assert by_neighbour.min() > 30
    assert stats.chi2_contingency(by_neighbour).pvalue > 1e-6

    random = kinds == 2
    by_token = np.zeros((2, 8), dtype=np.int64)
    np.add.at(by_token, (places[random] // 52, replaced[random] // 63), 1)
    assert stats.chi2_contingency(by_token).pvalue > 1e-6


@pytest.mark.parametrize("other", ["the next sequence", "the next epoch", "the next seed"])
def test_masks_of_one_sequence_say_nothing_about_those_of_another(other: str) -> None:
    count = 12_000
    rows = rows_of(sequences_alike(count), count)
    others = {
        "the next sequence": np.roll(rows, 1, axis=0),
        "the next epoch": rows_of(sequences_alike(count, epoch=1), count),
        "the next seed": rows_of(sequences_alike(count, seed=1), count),
    }[other]
    shared = (rows & others).sum(axis=1)
    expected = stats.hypergeom(100, 15, 15).pmf(np.arange(16)) * count
    found = np.bincount(shared, minlength=16)
    tail = int(np.flatnonzero(expected < 20)[0])
    found, expected = (np.append(each[:tail], each[tail:].sum()) for each in (found, expected))
    assert stats.chisquare(found, expected).pvalue > 1e-6


def test_masks_are_those_of_every_platform_and_version() -> None:
    """A run that resumes with another version would silently get other masks."""
    tokens = np.arange(10, 60)
    tokens[[0, 20, -1]] = CLS, SEP, SEP
    masked = mask([tokens], keys_of(1, 2, 3, np.array([3])), MaskingConfig())
    assert masked.positions.tolist() == [3, 8, 17, 25, 28, 31, 36, 38]
    assert masked.tokens[masked.positions].tolist() == [MASK, MASK, 27, MASK, 191, MASK, MASK, MASK]


def words(tokens: np.ndarray) -> list[list[int]]:
    """Returns the positions of each word, by a plain loop."""
    found: list[list[int]] = []
    before_is_ordinary = False
    for place, token in enumerate(tokens.tolist()):
        if token in SPECIAL:
            before_is_ordinary = False
            continue
        if token >= FIRST_CONTINUATION and before_is_ordinary:
            found[-1].append(place)
        else:
            found.append([place])
        before_is_ordinary = True
    return found


def test_whole_words_are_masked_whole_but_for_one_that_is_cut_at_its_end() -> None:
    sequences = pairs(np.random.default_rng(9).integers(5, 200, 300).tolist(), seed=10)
    masked = mask(sequences, keys_of(1, 0, 0, np.arange(300)), MaskingConfig(whole_words=True))
    plain = mask(sequences, keys_of(1, 0, 0, np.arange(300)), MaskingConfig())
    np.testing.assert_array_equal(masked.counts, plain.counts)
    several, cut_words, cut_in_plain = 0, 0, 0
    offsets = joined(sequences)[1]
    for tokens, (_, places, _), (_, plain_places, _) in zip(
        sequences, by_sequence(masked, offsets), by_sequence(plain, offsets), strict=True
    ):
        parts = [[place for place in word if place in set(places)] for word in words(tokens)]
        cut = [(part, word) for part, word in zip(parts, words(tokens), strict=True) if 0 < len(part) < len(word)]
        assert len(cut) <= 1
        assert all(part == word[: len(part)] for part, word in cut)
        cut_words += len(cut)
        several += sum(len(part) > 1 for part in parts)
        cut_in_plain += sum(0 < len(set(word) & set(plain_places)) < len(word) for word in words(tokens))
    assert several > 300
    assert 30 < cut_words < 300
    assert cut_in_plain > 1000, "the check of whole words would find words that are not whole"


def test_sequences_without_tokens_have_no_masks_and_no_bearing_on_others() -> None:
    first, last = pairs([60, 80])
    keys = keys_of(0, 0, 0, np.arange(65_537))
    lengths = np.zeros(65_537, dtype=np.int64)
    lengths[[0, -1]] = 60, 80
    tokens, offsets = np.concatenate([first, last]), np.append(0, np.cumsum(lengths))
    masked = mask_sequences(tokens, offsets, keys, MaskingConfig(), vocabulary())
    alone = [
        by_sequence(mask([one], keys[[place]], MaskingConfig()), joined([one])[1])
        for one, place in [(first, 0), (last, -1)]
    ]
    found = by_sequence(masked, offsets)
    assert [found[0], found[-1]] == [alone[0][0], alone[1][0]]
    assert masked.counts.nonzero()[0].tolist() == [0, 65_536]


def test_what_cannot_be_masked_is_refused() -> None:
    tokens = np.array([CLS, SEP, SEP, SEP, SEP, 9])
    with pytest.raises(ValueError, match="has 1 ordinary tokens, of which 3 are to be masked"):
        mask([tokens], np.zeros(1, dtype=np.uint64), MaskingConfig(share=1.0))
    with pytest.raises(ValueError, match="has 0 ordinary tokens, of which 1 are to be masked"):
        mask([*pairs([20]), np.full(4, SEP), *pairs([20])], keys_of(0, 0, 0, np.arange(3)), MaskingConfig())
    with pytest.raises(ValueError, match="sequence 1 has 65537 tokens"):
        mask([np.full(9, 9), np.full(65_537, 9)], np.zeros(2, dtype=np.uint64), MaskingConfig())
    with pytest.raises(ValueError, match="all 2 entries of the vocabulary are special"):
        MaskingVocabulary(mask_id=0, special=np.ones(2, dtype=bool), continues=np.zeros(2, dtype=bool))
    with pytest.raises(ValidationError, match=r"mask_share \(0.95\) and random_share \(0.1\) exceed 1"):
        MaskingConfig(mask_share=0.95)


def test_the_longest_sequence_is_masked_to_its_last_place() -> None:
    tokens = np.full(65_536, 9)
    config = MaskingConfig(share=1.0, max_predictions=65_533, mask_share=1.0, random_share=0.0)
    tokens[[0, 100, -1]] = CLS, SEP, SEP
    masked = mask([tokens], np.ones(1, dtype=np.uint64), config)
    assert masked.counts.tolist() == [65_533]
    assert (masked.tokens[masked.positions] == MASK).all()
    assert masked.positions[-1] == 65_534
