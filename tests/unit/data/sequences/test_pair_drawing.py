"""Drawing sentence pairs for all documents at once agrees with a loop over documents, and with the set shares."""

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from token_files import numbered_tokens

from evenpack.data.keys import derive_key
from evenpack.data.recipes import SentencePairsRecipe
from evenpack.data.sequences.pair_drawing import PairDrawing, PairSpans, SentenceIndex
from evenpack.data.tokens.file import TokenFile
from evenpack.errors import DataError


def recipe(longest: int, **changes: float | int) -> SentencePairsRecipe:
    return SentencePairsRecipe.model_validate({"kind": "sentence_pairs", "max_sequence_length": longest, **changes})


@pytest.fixture(scope="module")
def any_file(tmp_path_factory: pytest.TempPathFactory) -> TokenFile:
    """Writes any token file, for tests that use positions only."""
    return numbered_tokens(tmp_path_factory.mktemp("any") / "tokens", [2])


def index_of(documents: list[list[int]], token_file: TokenFile) -> SentenceIndex:
    lengths = [length for document in documents for length in document]
    return SentenceIndex(
        token_file=token_file,
        places=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        first_sentences=np.concatenate([[0], np.cumsum([len(document) for document in documents])]).astype(np.int64),
    )


def spans_of(documents: list[list[int]], settings: SentencePairsRecipe, token_file: TokenFile) -> PairSpans:
    drawing = PairDrawing(index_of(documents, token_file), np.arange(len(documents)), settings)
    return drawing.draw(0, len(documents), 0)


# A plain loop over one document, with the same draws.


def fraction(key: int, purpose: int) -> float:
    return (int(derive_key(key, purpose)) >> 11) / 2**53


def below(key: int, purpose: int, limit: int) -> int:
    return (int(derive_key(key, purpose)) >> 32) * limit >> 32


def coins(key: int, purpose: int, count: int) -> int:
    """Returns the number of heads among `count` coins: the highest bits of as many words as needed."""
    heads = 0
    for number in range(-(-count // 64)):
        word = int(derive_key(key, purpose, number))
        heads += (word >> (64 - min(count - 64 * number, 64))).bit_count()
    return heads


@dataclass
class Expected:
    pairs: list[tuple[list[int], list[int], bool]] = field(default_factory=list)
    """A and B as places of tokens in the file, and whether B is from elsewhere."""
    cut: int = 0
    borrowed: int = 0


def places_by_sentence(documents: list[list[int]]) -> list[list[list[int]]]:
    found, place = [], 0
    for document in documents:
        found.append([])
        for length in document:
            found[-1].append(list(range(place, place + length)))
            place += length
        place += 1  # end-of-text
    return found


def truncate(first: list[int], second: list[int], most: int, key: int) -> tuple[list[int], list[int]]:
    removed = [0, 0]
    while len(first) + len(second) - sum(removed) > most:
        removed[0 if len(first) - removed[0] > len(second) - removed[1] else 1] += 1
    fronts = [coins(key, purpose, count) for purpose, count in zip((6, 7), removed, strict=True)]
    return (
        first[fronts[0] : len(first) - removed[0] + fronts[0]],
        second[fronts[1] : len(second) - removed[1] + fronts[1]],
    )


def expect(documents: list[list[int]], split: list[int], settings: SentencePairsRecipe, pass_number: int) -> Expected:
    sentences = places_by_sentence(documents)
    most, expected = settings.max_sequence_length - 3, Expected()
    for own, document in enumerate(split):
        document_key = int(derive_key(settings.seed, pass_number, document))
        target = most
        if fraction(document_key, 0) < settings.short_target_probability:
            target = 2 + below(document_key, 1, most - 1)
        chunk: list[list[int]] = []
        number = cursor = 0
        while cursor < len(sentences[document]):
            chunk.append(sentences[document][cursor])
            cursor += 1
            if cursor < len(sentences[document]) and sum(map(len, chunk)) < target:
                continue
            key = int(derive_key(document_key, number))
            number += 1
            split_at = 1 + below(key, 2, max(len(chunk) - 1, 1))
            is_random = len(chunk) == 1 or fraction(key, 3) < settings.random_next_probability
            first = [place for sentence in chunk[:split_at] for place in sentence]
            second = [place for sentence in chunk[split_at:] for place in sentence]
            if is_random:
                other = below(key, 4, len(split) - 1)
                others = sentences[split[other + (other >= own)]]
                second = []
                for sentence in others[below(key, 5, len(others)) :]:
                    second += sentence
                    if len(second) >= target - len(first):
                        break
                cursor -= len(chunk) - split_at
                expected.borrowed += len(second)
            kept = truncate(first, second, most, key)
            expected.cut += len(first) + len(second) - len(kept[0]) - len(kept[1])
            expected.pairs.append((*kept, is_random))
            chunk = []
    return expected


def as_lists(spans: PairSpans) -> list[tuple[list[int], list[int], bool]]:
    columns = (spans.first_starts, spans.first_lengths, spans.second_starts, spans.second_lengths, spans.is_random_next)
    return [
        (list(range(a, a + a_length)), list(range(b, b + b_length)), bool(random))
        for a, a_length, b, b_length, random in zip(*(column.tolist() for column in columns), strict=True)
    ]


corpora = st.lists(st.lists(st.integers(1, 90), min_size=1, max_size=12), min_size=3, max_size=9)


@given(
    documents=corpora,
    longest=st.integers(5, 60),
    chances=st.tuples(st.sampled_from([0.0, 0.1, 0.6, 1.0]), st.sampled_from([0.0, 0.5, 1.0])),
    data=st.data(),
)
@settings(max_examples=150)
def test_all_documents_at_once_give_what_a_loop_over_each_gives(
    any_file: TokenFile, documents: list[list[int]], longest: int, chances: tuple[float, float], data: st.DataObject
) -> None:
    settings = recipe(
        longest,
        short_target_probability=chances[0],
        random_next_probability=chances[1],
        seed=data.draw(st.integers(0, 2**63 - 1)),
    )
    split = sorted(data.draw(st.sets(st.integers(0, len(documents) - 1), min_size=2)))
    pass_number = data.draw(st.integers(0, 3))
    drawing = PairDrawing(index_of(documents, any_file), np.array(split), settings)
    expected = expect(documents, split, settings, pass_number)

    whole = drawing.draw(0, len(split), pass_number)
    assert as_lists(whole) == expected.pairs
    assert (whole.tokens_cut, whole.tokens_borrowed) == (expected.cut, expected.borrowed)
    parts = [drawing.draw(first, last, pass_number) for first, last in pairwise([0, 1, len(split)])]
    assert [pair for part in parts for pair in as_lists(part)] == expected.pairs


@given(documents=corpora, seed=st.integers(0, 1000))
@settings(max_examples=50)
def test_without_cuts_each_sentence_is_used_once_and_none_is_split(
    any_file: TokenFile, documents: list[list[int]], seed: int
) -> None:
    spans = spans_of(documents, recipe(4000, seed=seed, short_target_probability=1.0), any_file)
    assert spans.tokens_cut == 0
    sentences = places_by_sentence(documents)
    document_of = {place: number for number, found in enumerate(sentences) for part in found for place in part}
    own: list[int] = []
    for first, second, random in as_lists(spans):
        document = document_of[first[0]]
        assert (document_of[second[0]] != document) == random
        starts = [sentence[0] for found in sentences for sentence in found]
        ends = [sentence[-1] for found in sentences for sentence in found]
        assert first[0] in starts
        assert second[0] in starts
        assert first[-1] in ends
        assert second[-1] in ends
        assert {document_of[place] for place in second} == {document_of[second[0]]}
        assert random or second[0] == first[-1] + 1
        own += first if random else first + second
    assert own == [place for found in sentences for sentence in found for place in sentence]


def within(found: int, count: int, share: float) -> bool:
    """Returns bounds that a fair draw exceeds less than once in a million."""
    low, high = stats.binom.interval(1 - 1e-6, count, share)
    return bool(low <= found <= high)


TINY = [[1] * 100] * 4000
"""Sentences of one token: chunks reach their target exactly, and nothing is cut."""
MOST = 20


def tiny_pairs(any_file: TokenFile, **changes: float | int) -> tuple[PairSpans, np.ndarray]:
    """Returns pairs, and the position of each A within its document."""
    spans = spans_of(TINY, recipe(MOST + 3, **changes), any_file)
    assert spans.tokens_cut == 0
    return spans, spans.first_starts % 101


@pytest.mark.parametrize("probability", [0.5, 0.2])
def test_half_of_the_chunks_with_a_choice_get_a_random_next(any_file: TokenFile, probability: float) -> None:
    spans, places = tiny_pairs(any_file, short_target_probability=0.0, random_next_probability=probability)
    has_choice = places < 99
    assert has_choice.sum() > 20_000
    assert spans.is_random_next[~has_choice].all()
    assert within(int(spans.is_random_next[has_choice].sum()), int(has_choice.sum()), probability)
    assert not within(int(spans.is_random_next[has_choice].sum()), int(has_choice.sum()), probability + 0.03)


def test_a_tenth_of_documents_have_shorter_targets_of_uniform_lengths(any_file: TokenFile) -> None:
    spans, places = tiny_pairs(any_file)
    totals = (spans.first_lengths + spans.second_lengths)[places == 0]
    assert len(totals) == 4000
    chance = 0.1 * (1 - 1 / (MOST - 1))
    # A random next may end with its document, short of the target; where B goes on, the target is seen.
    exact = ~spans.is_random_next[places == 0]
    short = totals[exact] < MOST
    assert within(int(short.sum()), int(exact.sum()), chance)
    assert not within(int(short.sum()), int(exact.sum()), 0.15)

    spans, places = tiny_pairs(any_file, short_target_probability=1.0)
    totals = (spans.first_lengths + spans.second_lengths)[(places == 0) & ~spans.is_random_next]
    assert (totals.min(), totals.max()) == (2, MOST)
    assert stats.chisquare(np.bincount(totals)[2:]).pvalue > 1e-6


def test_splits_other_documents_and_their_first_sentences_are_drawn_evenly(any_file: TokenFile) -> None:
    spans, places = tiny_pairs(any_file, short_target_probability=0.0, random_next_probability=1.0)
    first = spans.first_lengths[places == 0]
    assert stats.chisquare(np.bincount(first)[1:]).pvalue > 1e-6
    assert (first.min(), first.max()) == (1, MOST - 1)
    others = spans.second_starts // 101
    assert (others != spans.first_starts // 101).all()
    assert stats.chisquare(np.bincount(others, minlength=4000)).pvalue > 1e-6
    assert stats.chisquare(np.bincount(spans.second_starts % 101)).pvalue > 1e-6


def test_what_is_cut_goes_at_the_front_and_at_the_end_alike(any_file: TokenFile) -> None:
    spans = spans_of(
        [[60, 60]] * 4000, recipe(103, random_next_probability=0.0, short_target_probability=0.0), any_file
    )
    assert (spans.first_lengths == 50).all()
    assert (spans.second_lengths == 50).all()
    for starts, origin in ((spans.first_starts, 0), (spans.second_starts, 60)):
        fronts = starts % 121 - origin
        assert within(int(fronts.sum()), 10 * 4000, 0.5)
        ten_coins = stats.binom.pmf(np.arange(11), 10, 0.5)
        found, expected = (
            np.append(values[2:9], values[[0, 1, 9, 10]].sum())
            for values in (np.bincount(fronts, minlength=11), 4000 * ten_coins)
        )
        assert stats.chisquare(found, expected).pvalue > 1e-6


def test_sentences_of_another_file_are_refused(tmp_path: Path) -> None:
    token_file = numbered_tokens(tmp_path / "tokens", [6, 5, 3])  # sentences of 2 and 3, 4, 1 and 1 tokens, and ends
    index = SentenceIndex.of(token_file, np.array([2, 3, 4, 1, 1]))
    assert index.first_sentences.tolist() == [0, 2, 3, 5]
    assert index.places.tolist() == [0, 2, 5, 9, 10, 11]
    for wrong in ([2, 4, 3, 1, 1], [2, 3, 4, 1], [2, 3, 4, 1, 1, 1], []):
        with pytest.raises(DataError, match="do not end where its documents end"):
            SentenceIndex.of(token_file, np.array(wrong, dtype=np.int64))
    with pytest.raises(DataError, match=r"sentence_lengths\.npy is missing or damaged"):
        SentenceIndex.open(token_file)
