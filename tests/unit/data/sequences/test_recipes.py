"""Recipes put every token in one place, and agree with plain loops over lists."""

import pickle
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from token_files import write

from evenpack.data.recipes import ConcatRecipe, DocumentsRecipe, PaddingRecipe
from evenpack.data.sequences import SequenceView, TokenAccounting, build_view, length_chunks, open_view
from evenpack.data.tokens.array_file import write_array
from evenpack.data.tokens.file import TokenFile
from evenpack.errors import DataError

Recipe = DocumentsRecipe | ConcatRecipe

LENGTHS = [*range(1, 25), *[1, 8, 8, 1, 1, 1, 7, 9, 16, 17, 15, 24, 3, 3, 3, 40, 1, 2]]


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> TokenFile:
    """Writes documents in which the id of each token is its place in the file."""
    documents = np.split(np.arange(sum(LENGTHS)), np.cumsum(LENGTHS)[:-1])
    return write(tmp_path_factory.mktemp("recipes") / "tokens", documents)


@dataclass
class Expected:
    """Expected sequences as lists of segments, segments as lists of tokens."""

    sequences: list[list[list[int]]]
    cut: int = 0
    too_short: int = 0
    too_long: int = 0


def expect(recipe: Recipe, documents: list[list[int]]) -> Expected:
    expected = Expected(sequences=[])
    kept = [document for document in documents if len(document) >= recipe.minimum_document_length]
    expected.too_short = sum(map(len, documents)) - sum(map(len, kept))
    longest = recipe.max_sequence_length
    if isinstance(recipe, ConcatRecipe):
        stream = [(token, index) for index, document in enumerate(kept) for token in document]
        for start in range(0, len(stream), longest):
            segments: list[list[int]] = []
            before = None
            for token, index in stream[start : start + longest]:
                if before is None or (recipe.isolate_documents and index != before):
                    segments.append([])
                segments[-1].append(token)
                before = index
            expected.sequences.append(segments)
        return expected
    for document in kept:
        if recipe.long_documents == "split":
            expected.sequences += [[document[start : start + longest]] for start in range(0, len(document), longest)]
        elif recipe.long_documents == "drop" and len(document) > longest:
            expected.too_long += len(document)
        else:
            expected.sequences.append([document[:longest]])
            expected.cut += len(document[longest:])
    return expected


def token_lists(token_file: TokenFile, documents: np.ndarray) -> list[list[int]]:
    starts, lengths = token_file.spans(documents)
    return [list(range(start, start + length)) for start, length in zip(starts, lengths, strict=True)]


documents_recipes = st.builds(
    DocumentsRecipe,
    kind=st.just("documents"),
    max_sequence_length=st.integers(2, 12),
    long_documents=st.sampled_from(["split", "truncate", "drop"]),
    minimum_document_length=st.integers(1, 10),
)
concat_recipes = st.builds(
    ConcatRecipe,
    kind=st.just("concat"),
    max_sequence_length=st.integers(2, 12),
    isolate_documents=st.booleans(),
    minimum_document_length=st.integers(1, 10),
)
recipes = documents_recipes | concat_recipes
splits = st.sets(st.integers(0, len(LENGTHS) - 1)).map(lambda ids: np.array(sorted(ids), dtype=np.int64))


@given(recipe=recipes, split=splits, data=st.data())
@settings(max_examples=300)
def test_a_view_gives_what_plain_loops_give(
    token_file: TokenFile, recipe: Recipe, split: np.ndarray, data: st.DataObject
) -> None:
    view = build_view(recipe, token_file, split)
    expected = expect(recipe, token_lists(token_file, split)).sequences
    asked = data.draw(st.lists(st.integers(0, max(len(expected) - 1, 0)), max_size=30 if expected else 0))
    ids = np.array(asked, dtype=np.int64)
    segments = [expected[index] for index in asked]
    flat = [[token for segment in sequence for token in segment] for sequence in segments]

    assert isinstance(view, SequenceView)
    assert view.count == len(expected)
    assert view.max_sequence_length == recipe.max_sequence_length
    assert view.max_segments_per_sequence == max([len(sequence) for sequence in expected], default=1)
    assert view.lengths().tolist() == [sum(map(len, sequence)) for sequence in expected]

    lengths = view.lengths()[ids]
    for counts in (view.counts(ids, lengths), view.read(ids).counts):
        assert counts.lengths.tolist() == lengths.tolist()
        assert counts.segment_lengths.tolist() == [len(segment) for sequence in segments for segment in sequence]
        assert counts.segments.tolist() == [len(sequence) for sequence in segments]
        assert counts.targets.tolist() == [sum(len(segment) - 1 for segment in sequence) for sequence in segments]
    assert view.read(ids).tokens.tolist() == [token for tokens in flat for token in tokens]


@given(recipe=recipes, split=splits)
@settings(max_examples=200)
def test_every_token_is_in_one_sequence_once_or_counted_as_cut_or_dropped(
    token_file: TokenFile, recipe: Recipe, split: np.ndarray
) -> None:
    view = build_view(recipe, token_file, split)
    documents = token_lists(token_file, split)
    found = Counter(view.read(np.arange(view.count)).tokens.tolist())
    read = Counter(token for document in documents for token in document)
    expected = expect(recipe, documents)

    assert set(found.values()) <= {1}
    assert found <= read
    accounting = view.accounting
    assert accounting.tokens_kept == found.total() == view.lengths().sum()
    assert (accounting.tokens_read, accounting.documents_read) == (read.total(), len(split))
    assert (read - found).total() == expected.cut + expected.too_short + expected.too_long
    assert (accounting.tokens_cut, accounting.tokens_too_short, accounting.tokens_too_long) == (
        expected.cut,
        expected.too_short,
        expected.too_long,
    )
    assert accounting.documents_kept == sum(any(token in found for token in document) for document in documents)
    assert accounting.documents_too_short == sum(len(d) < recipe.minimum_document_length for d in documents)
    assert accounting.sequences == len(expected.sequences)


@given(recipe=recipes, split=splits, data=st.data())
@settings(max_examples=200)
def test_lengths_are_given_for_any_range_of_sequences(
    token_file: TokenFile, recipe: Recipe, split: np.ndarray, data: st.DataObject
) -> None:
    view = build_view(recipe, token_file, split)
    sequences = expect(recipe, token_lists(token_file, split)).sequences
    expected = np.array([sum(map(len, segments)) for segments in sequences], dtype=np.int64)
    start = data.draw(st.integers(0, view.count))
    stop = data.draw(st.integers(start, view.count))

    assert view.lengths(start, stop).tolist() == expected[start:stop].tolist()
    assert view.lengths(start).tolist() == expected[start:].tolist()

    size = data.draw(st.integers(1, 9))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("evenpack.data.sequences.view._CHUNK_SEQUENCES", size)
        chunks = [chunk.tolist() for chunk in length_chunks(view)]
    assert chunks == [expected[begin : begin + size].tolist() for begin in range(0, view.count, size)]


@pytest.mark.parametrize("policy", ["split", "truncate", "drop"])
@pytest.mark.parametrize("chunk", [1, 5, 1 << 20])
def test_documents_that_are_read_in_chunks_are_stored_as_the_same_bytes(
    token_file: TokenFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, policy: Any
) -> None:
    recipe = DocumentsRecipe(kind="documents", max_sequence_length=8, long_documents=policy)
    expected = build_view(recipe, token_file, np.arange(len(LENGTHS)))
    expected.save(tmp_path / "expected")
    monkeypatch.setattr("evenpack.data.tokens.file._FEW_DOCUMENTS", 2)
    monkeypatch.setattr("evenpack.data.sequences.documents._CHUNK_DOCUMENTS", chunk)

    for name, documents in [("all", None), ("named", np.arange(len(LENGTHS)))]:
        stored = build_view(recipe, token_file, documents, directory=tmp_path / name)
        assert (stored.directory, stored.accounting) == (tmp_path / name, expected.accounting)
        files = sorted(path.name for path in (tmp_path / name).iterdir())
        assert files == ["documents.npy", "first_sequences.npy", "view.json"]
        for file in files:
            assert (tmp_path / name / file).read_bytes() == (tmp_path / "expected" / file).read_bytes(), file


@pytest.mark.parametrize("chunk", [1, 5, 1 << 20])
def test_documents_that_are_too_long_are_counted_over_all_chunks_and_the_first_is_named(
    token_file: TokenFile, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr("evenpack.data.sequences.documents._CHUNK_DOCUMENTS", chunk)
    recipe = DocumentsRecipe(kind="documents", max_sequence_length=8, long_documents="error")
    first, *others = [document for document, length in enumerate(LENGTHS) if length > 8]
    message = rf"document {first} of .*tokens has {LENGTHS[first]} tokens, the first of {1 + len(others)} above .*\(8\)"
    with pytest.raises(DataError, match=message):
        build_view(recipe, token_file, None)
    assert build_view(recipe, token_file, np.arange(first)).count == first - 1, "all but the document of one token"


def test_neighbouring_documents_are_one_slice(token_file: TokenFile, monkeypatch: pytest.MonkeyPatch) -> None:
    split = np.array([0, 1, 2, 3, 4, 10, 11])
    view = build_view(
        ConcatRecipe(kind="concat", max_sequence_length=1 << 20, minimum_document_length=1), token_file, split
    )
    slices = []
    gather = TokenFile.gather

    def counted(self: TokenFile, offsets: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        slices.append(len(offsets))
        return gather(self, offsets, lengths)

    monkeypatch.setattr(TokenFile, "gather", counted)

    assert len(view.read(np.array([0])).tokens) == sum(LENGTHS[index] for index in split)
    assert slices == [2]


class Unreadable(np.ndarray):
    def __getitem__(self, index: object) -> Any:
        raise TypeError("tokens are read")


OF_ATOMS = [
    ConcatRecipe(kind="concat", max_sequence_length=8, atom=4),
    PaddingRecipe(kind="padding", max_sequence_length=8, atom=8),
    PaddingRecipe(kind="padding", max_sequence_length=4, atom=16),
]
OF_EIGHT = [
    DocumentsRecipe(kind="documents", max_sequence_length=8),
    ConcatRecipe(kind="concat", max_sequence_length=8),
    ConcatRecipe(kind="concat", max_sequence_length=8, isolate_documents=False),
]


@pytest.mark.parametrize("recipe", OF_EIGHT)
def test_counts_read_no_token(token_file: TokenFile, monkeypatch: pytest.MonkeyPatch, recipe: Recipe) -> None:
    monkeypatch.setattr(token_file, "_tokens", np.empty(0).view(Unreadable))
    view = build_view(recipe, token_file, np.arange(len(LENGTHS)))
    ids = np.arange(view.count)

    lengths = view.lengths()
    view.counts(ids, lengths)
    with pytest.raises(TypeError, match="tokens are read"):
        view.read(ids)


@pytest.mark.parametrize("ids", [[-1], [0, 10_000]])
@pytest.mark.parametrize("recipe", OF_EIGHT)
def test_a_sequence_that_there_is_not_is_an_error(token_file: TokenFile, recipe: Recipe, ids: list[int]) -> None:
    view = build_view(recipe, token_file, np.arange(len(LENGTHS)))
    asked = np.array(ids)

    for call in (view.read, lambda asked: view.counts(asked, asked)):
        with pytest.raises(IndexError, match=f"asked for, there are {view.count}"):
            call(asked)


@pytest.mark.parametrize("recipe", [*OF_EIGHT, *OF_ATOMS])
@pytest.mark.parametrize("documents", [len(LENGTHS), 0])
def test_a_stored_view_is_the_same_and_pickles_as_the_name_of_its_folder(
    token_file: TokenFile, tmp_path: Path, recipe: Recipe, documents: int
) -> None:
    built = build_view(recipe, token_file, np.arange(documents))
    built.save(tmp_path / "train")
    opened = open_view(tmp_path / "train", token_file, recipe)
    pickled = pickle.dumps(opened)

    assert len(pickled) < 1000
    for view in (opened, pickle.loads(pickled), pickle.loads(pickle.dumps(built))):
        assert type(view) is type(built)
        assert (view.recipe, view.accounting) == (built.recipe, built.accounting)
        assert view.max_segments_per_sequence == built.max_segments_per_sequence
        ids = np.arange(built.count)[::-1].copy()
        assert view.lengths().tolist() == built.lengths().tolist()
        assert view.read(ids).tokens.tolist() == built.read(ids).tokens.tolist()
        assert view.read(ids).counts.segments.tolist() == built.read(ids).counts.segments.tolist()


def test_a_stored_view_that_is_missing_torn_or_of_another_file_is_refused(
    token_file: TokenFile, tmp_path: Path
) -> None:
    recipe = ConcatRecipe(kind="concat", max_sequence_length=8)
    with pytest.raises(DataError, match=r"view\.json is missing or damaged"):
        open_view(tmp_path / "nowhere", token_file, recipe)

    build_view(recipe, token_file, np.arange(len(LENGTHS))).save(tmp_path / "train")
    other = write(tmp_path / "other", [np.arange(6)])
    with pytest.raises(DataError, match=r"made for a token file of \d+ tokens, .*other has 6"):
        open_view(tmp_path / "train", other, recipe)

    with pytest.raises(DataError, match=r"made by the recipe .*8.*, asked for is .*9"):
        open_view(tmp_path / "train", token_file, recipe.model_copy(update={"max_sequence_length": 9}))

    starts = tmp_path / "train" / "stream_starts.npy"
    whole = starts.read_bytes()
    for torn in (whole[:-1], whole[:40], b""):
        starts.write_bytes(torn)
        with pytest.raises(DataError, match=r"stream_starts\.npy is missing or damaged"):
            open_view(tmp_path / "train", token_file, recipe)
    starts.unlink()
    with pytest.raises(DataError, match=r"stream_starts\.npy is missing or damaged"):
        open_view(tmp_path / "train", token_file, recipe)


def test_a_view_stored_again_and_cut_short_is_neither_the_old_nor_a_mixture(
    token_file: TokenFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_view(ConcatRecipe(kind="concat", max_sequence_length=8), token_file, np.arange(40)).save(tmp_path)
    other = build_view(ConcatRecipe(kind="concat", max_sequence_length=9), token_file, np.arange(40))
    saved = []

    def save_two(path: Path, array: np.ndarray) -> None:
        if len(saved) == 2:
            raise KeyboardInterrupt
        saved.append(path)
        write_array(path, array)

    monkeypatch.setattr("evenpack.data.sequences.view.write_array", save_two)
    with pytest.raises(KeyboardInterrupt):
        other.save(tmp_path)

    with pytest.raises(DataError, match=r"view\.json is missing or damaged"):
        open_view(tmp_path, token_file, other.recipe)


def test_a_ledger_that_does_not_balance_cannot_be_made() -> None:
    accounting = TokenAccounting.of_whole(sequences=9, tokens=100)
    for counted, names in (
        ("tokens", "read kept cut too_short too_long"),
        ("documents", "read kept too_short too_long"),
    ):
        for name in (f"{counted}_{one}" for one in names.split()):
            with pytest.raises(ValueError, match=f"{counted} read.* are not"):
                replace(accounting, **{name: getattr(accounting, name) + 1})
    with pytest.raises(ValueError, match="below zero: tokens_cut"):
        replace(accounting, tokens_cut=-1, tokens_kept=101)
