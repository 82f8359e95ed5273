"""Rows of shuffled atoms agree with the paper's examples and with plain loops over lists."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prepared_files import contents
from pydantic import ValidationError
from token_files import END, left_out_of, numbered_tokens

from evenpack.data.recipes import ConcatRecipe, PaddingRecipe
from evenpack.data.sequences import SequenceView, build_view
from evenpack.data.sequences.pieces import shuffled_atoms
from evenpack.data.tokens.file import TokenFile

LENGTHS = [5, 2, 9, 1, 17, 33, 2, 3, 64, 4, 4, 16, 15, 18, 40, 8, 9, 2, 1, 12]
SIZES = [(row, atom) for row in (4, 8, 12) for atom in (2, 4, 8, 12, 16, 24) if row % atom == 0 or atom % row == 0]

Row = list[tuple[int, int]]
"""Of each slot: the place in the token file, or -1, and 0 for a token, 1 for an end, 2 for what only fills up."""


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> TokenFile:
    return numbered_tokens(tmp_path_factory.mktemp("atoms") / "tokens", LENGTHS)


def padding_recipe(row: int, atom: int, **settings: object) -> PaddingRecipe:
    return PaddingRecipe.model_validate({"kind": "padding", "max_sequence_length": row, "atom": atom, **settings})


def concat_recipe(row: int, atom: int, **settings: object) -> ConcatRecipe:
    return ConcatRecipe.model_validate({"kind": "concat", "max_sequence_length": row, "atom": atom, **settings})


def of_one_document(tmp_path: Path, tokens: int, recipe: PaddingRecipe) -> SequenceView:
    """Builds rows of one document of `tokens` tokens, its end-of-text not counted."""
    return build_view(recipe, numbered_tokens(tmp_path / "tokens", [tokens + 1]), np.array([0]))


def kinds_of(view: SequenceView) -> list[str]:
    """Returns each row with one letter per slot: t for a token, e for a closing end-of-text, p for padding."""
    ids = np.arange(view.count)
    padding = left_out_of(view, ids, "closing")
    letters = np.where(view.read(ids).tokens == END, np.where(padding, "p", "e"), "t")
    return ["".join(row) for row in np.split(letters, np.cumsum(view.lengths())[:-1])]


def test_the_papers_example_of_130_tokens_at_64(tmp_path: Path) -> None:
    rows = kinds_of(of_one_document(tmp_path, 130, padding_recipe(64, 64)))

    assert Counter(rows) == Counter({"t" * 63 + "e": 2, "tttt" + "e" + "p" * 59: 1})


def test_the_papers_example_of_35_tokens_at_32_with_atoms_of_128(tmp_path: Path) -> None:
    view = of_one_document(tmp_path, 35, padding_recipe(32, 128))

    assert kinds_of(view) == ["t" * 32, "ttt" + "e" + "p" * 28]
    assert view.accounting.padding_slots == 28


def test_filling_atoms_are_distinguished_whatever_the_loss_counts(tmp_path: Path) -> None:
    for predicted in ("all", "closing", "none"):
        view = of_one_document(tmp_path / predicted, 5, padding_recipe(8, 8, end_of_text_in_loss=predicted))
        view.save(tmp_path / f"view_{predicted}")
        counts = view.read(np.array([0])).counts
        assert (counts.padding_tokens, counts.padding_targets) == (2, 2 if predicted == "all" else 0)
        assert (counts.segment_lengths.tolist(), counts.real_lengths.tolist()) == ([8], [6])
        assert counts.targets.tolist() == [{"all": 7, "closing": 5, "none": 4}[predicted]]
        assert left_out_of(view, np.array([0]), "closing").tolist() == [False] * 6 + [True] * 2
    assert contents(tmp_path / "view_all") == contents(tmp_path / "view_closing") == contents(tmp_path / "view_none")


def expected_atoms(recipe: ConcatRecipe | PaddingRecipe, documents: list[list[int]]) -> list[Row]:
    """Returns the atoms in the order of the documents; documents are lists of positions in the token file."""
    if isinstance(recipe, ConcatRecipe):
        stream = [(place, 0) for document in documents for place in document]
        assert recipe.atom is not None
        return [stream[start : start + recipe.atom] for start in range(0, len(stream), recipe.atom)]
    unit = recipe.atom if recipe.pad_tails_to == "atom" else min(recipe.atom, recipe.max_sequence_length)
    atoms = []
    for document in documents:
        text = document[:-1]
        for start in range(0, len(text), recipe.atom - 1):
            piece: Row = [(place, 0) for place in text[start : start + recipe.atom - 1]]
            if len(piece) % unit or len(piece) == recipe.atom - 1:
                piece.append((-1, 1))
            while len(piece) % unit:
                piece.append((-1, 2))
            atoms.append(piece)
    return atoms


def expected_rows(recipe: ConcatRecipe | PaddingRecipe, documents: list[list[int]]) -> list[Row]:
    atoms = expected_atoms(recipe, documents)
    assert recipe.atom is not None
    moved = len(atoms)
    if isinstance(recipe, ConcatRecipe) and atoms and len(atoms[-1]) < recipe.atom:
        moved -= 1  # the rest of the stream stays last
    order = shuffled_atoms(len(atoms), moved=moved, seed=42 if recipe.seed is None else recipe.seed)
    slots = [slot for atom in order for slot in atoms[atom]]
    return [
        slots[start : start + recipe.max_sequence_length] for start in range(0, len(slots), recipe.max_sequence_length)
    ]


splits = st.sets(st.integers(0, len(LENGTHS) - 1), min_size=1).map(lambda ids: np.array(sorted(ids)))
shared = {"isolate_documents": st.booleans(), "seed": st.integers(0, 5)}
recipes = st.builds(
    lambda size, **settings: concat_recipe(*size, **settings), st.sampled_from(SIZES), **shared
) | st.builds(
    lambda size, **settings: padding_recipe(*size, **settings),
    st.sampled_from(SIZES),
    pad_tails_to=st.sampled_from(["row", "atom"]),
    **shared,
)


@given(recipe=recipes, ids=splits, data=st.data())
@settings(max_examples=200)
def test_rows_are_what_plain_loops_give(
    token_file: TokenFile, recipe: ConcatRecipe | PaddingRecipe, ids: np.ndarray, data: st.DataObject
) -> None:
    isolate = recipe.isolate_documents
    view = build_view(recipe, token_file, ids)
    starts, lengths = token_file.spans(ids)
    documents = [
        list(range(start, start + length)) for start, length in zip(starts, lengths, strict=True) if length > 1
    ]
    rows = expected_rows(recipe, documents)

    assert view.count == len(rows)
    assert view.lengths().tolist() == [len(row) for row in rows]
    asked = np.array(data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=8)) if rows else [], dtype=np.int64)
    slots = [slot for row in asked for slot in rows[row]]
    file_tokens = token_file.read(0, token_file.tokens)
    assert view.read(asked).tokens.tolist() == [END if kind else int(file_tokens[place]) for place, kind in slots]
    assert left_out_of(view, asked, "closing").tolist() == [kind == 2 for _, kind in slots]
    segments = [segments_of(rows[row], documents, isolate=isolate) for row in asked]
    for found in (view.counts(asked, view.lengths()[asked]), view.read(asked).counts):
        assert found.lengths.tolist() == [sum(row) for row in segments]
        assert found.segment_lengths.tolist() == [length for row in segments for length in row]
        assert found.segments.tolist() == [len(row) for row in segments]
        assert (found.padding is None) == isinstance(recipe, ConcatRecipe)
        assert found.padding_tokens == sum(kind == 2 for _, kind in slots)
    longest = max([len(segments_of(row, documents, isolate=isolate)) for row in rows], default=1)
    assert view.max_segments_per_sequence == longest


def segments_of(row: Row, documents: list[list[int]], *, isolate: bool) -> list[int]:
    """Returns segments: a new one begins if the next token does not follow in the same document."""
    if not isolate:
        return [len(row)]
    document_of = {place: index for index, document in enumerate(documents) for place in document}
    lengths: list[int] = []
    before: int | None = None
    for index, (place, kind) in enumerate(row):
        is_new = kind == 0 and (before is None or place != before + 1 or document_of[place] != document_of[before])
        # A row of an atom's padding alone goes on with what stands before it, as it does in its atom.
        if index == 0 or (is_new and before is not None):
            lengths.append(0)
        lengths[-1] += 1
        before = place if kind == 0 else before
    return lengths


@given(size=st.sampled_from(SIZES), earlier=st.booleans(), kind=st.sampled_from(["concat", "padding"]))
@settings(max_examples=60)
def test_every_token_is_in_one_row_once(token_file: TokenFile, size: tuple[int, int], earlier: bool, kind: str) -> None:
    recipe = (
        concat_recipe(*size) if kind == "concat" else padding_recipe(*size, pad_tails_to="atom" if earlier else "row")
    )
    view = build_view(recipe, token_file, np.arange(len(LENGTHS)))
    tokens = view.read(np.arange(view.count)).tokens
    read = token_file.read(0, token_file.tokens)
    accounting = view.accounting

    texts = read[read != END]
    assert sorted(tokens[tokens != END]) == sorted(texts)
    padding = left_out_of(view, np.arange(view.count), "closing")
    assert int((tokens != END).sum()) + accounting.padding_slots <= len(tokens) == int(view.lengths().sum())
    if kind == "padding":
        assert accounting.padding_slots == int(padding.sum())
        assert accounting.tokens_kept == int((~padding).sum())
        assert accounting.tokens_subsequence_ends + accounting.tokens_tail_ends == int((tokens == END)[~padding].sum())


def test_steps_of_an_epoch_by_atom_come_in_the_papers_order(tmp_path: Path) -> None:
    """The order of A.10 for rows of 64: an atom of 1 row has most steps, then 2, 4, then half and a quarter."""
    lengths = np.random.default_rng(0).lognormal(4.9, 0.45, size=4000).astype(int).clip(58, 1200)
    token_file = numbered_tokens(tmp_path / "tokens", lengths.tolist())
    documents = np.arange(len(lengths))
    rows = {atom: build_view(padding_recipe(64, atom), token_file, documents).count for atom in (16, 32, 64, 128, 256)}

    assert rows[64] > rows[128] > rows[256] > max(rows[32], rows[16])


def test_another_seed_is_another_order_of_the_same_atoms(token_file: TokenFile) -> None:
    first, second = (
        build_view(padding_recipe(8, 8, seed=seed), token_file, np.arange(len(LENGTHS))) for seed in (42, 43)
    )
    ids = np.arange(first.count)
    rows = [sorted(map(tuple, view.read(ids).tokens.reshape(-1, 8).tolist())) for view in (first, second)]

    assert first.read(ids).tokens.tolist() != second.read(ids).tokens.tolist()
    assert rows[0] == rows[1]


@pytest.mark.parametrize(
    ("make", "row", "atom", "message"),
    [
        (concat_recipe, 64, 24, "neither a divisor nor a multiple.*give 1, 2, 4, 8, 16, 32, or a multiple of 64"),
        (padding_recipe, 64, 96, "neither a divisor nor a multiple"),
        (padding_recipe, 64, 1, "its only slot would hold the end-of-text"),
    ],
)
def test_an_atom_that_does_not_go_with_the_rows_is_refused(make: object, row: int, atom: int, message: str) -> None:
    assert callable(make)
    with pytest.raises(ValidationError, match=message):
        make(row, atom)


def test_a_seed_without_an_atom_is_refused() -> None:
    with pytest.raises(ValidationError, match="give an atom, or leave the seed out"):
        ConcatRecipe(kind="concat", max_sequence_length=8, seed=1)
