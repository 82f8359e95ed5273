"""Origins of sequences: the parts that a view names hold its tokens."""

import numpy as np
import pytest
from pydantic import TypeAdapter
from token_files import END, left_out_of, numbered_tokens

from evenpack.data.recipes import Recipe
from evenpack.data.sequences import ViewOfDocuments, build_view
from evenpack.data.sequences.pieces import PaddingView
from evenpack.data.tokens.file import TokenFile

LENGTHS = [5, 2, 9, 1, 17, 33, 2, 3, 64, 4, 4, 16, 15, 18, 40, 8, 9, 2, 1, 12]
OTHER_SPLIT = {2, 11, 19}
"""Documents of the file that are not of the split."""

RECIPES = [
    {"kind": "documents", "max_sequence_length": 8},
    {"kind": "documents", "max_sequence_length": 16, "long_documents": "truncate"},
    {"kind": "documents", "max_sequence_length": 16, "long_documents": "drop"},
    {"kind": "concat", "max_sequence_length": 12},
    {"kind": "concat", "max_sequence_length": 8, "isolate_documents": False},
    *({"kind": "concat", "max_sequence_length": 12, "atom": atom} for atom in (1, 4, 12, 24)),
    *({"kind": "padding", "max_sequence_length": 12, "atom": atom} for atom in (2, 4, 12, 24)),
    {"kind": "padding", "max_sequence_length": 6, "atom": 24, "pad_tails_to": "atom"},
]


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> TokenFile:
    return numbered_tokens(tmp_path_factory.mktemp("origins") / "tokens", LENGTHS)


@pytest.fixture(params=RECIPES, ids=lambda recipe: "-".join(str(value) for value in recipe.values()))
def view(request: pytest.FixtureRequest, token_file: TokenFile) -> ViewOfDocuments:
    documents = np.array([document for document in range(len(LENGTHS)) if document not in OTHER_SPLIT])
    return build_view(TypeAdapter(Recipe).validate_python(request.param), token_file, documents)


def named(view: ViewOfDocuments, sequence: int) -> tuple[list[int], list[tuple[int, int, int]]]:
    """Returns the tokens in the named parts of a sequence, and these parts."""
    found = view.origins(np.array([sequence]))
    parts = list(zip(found.documents.tolist(), found.starts.tolist(), found.tokens.tolist(), strict=True))
    assert found.per_sequence.tolist() == [len(parts)]
    begins = np.concatenate([[0], np.cumsum(LENGTHS)])
    tokens = [view.token_file.read(int(begins[one]) + start, int(begins[one]) + start + n) for one, start, n in parts]
    return np.concatenate([np.zeros(0, dtype=np.int64), *tokens]).tolist(), parts


def test_the_named_parts_hold_the_tokens_of_each_sequence(view: ViewOfDocuments):
    for sequence in range(view.count):
        tokens, parts = named(view, sequence)
        expected = view.read(np.array([sequence])).tokens.tolist()
        if isinstance(view, PaddingView):  # puts ends of text in, which are of no document
            assert [token for token in tokens if token != END] == [token for token in expected if token != END]
            is_padding = left_out_of(view, np.array([sequence]), "closing")
            assert (not parts) == bool(is_padding.all())  # rows of padding are of no document
        else:
            assert tokens == expected
        assert not OTHER_SPLIT & {document for document, _, _ in parts}


def test_many_sequences_at_once_are_named_as_one_by_one(view: ViewOfDocuments):
    together = view.origins(np.arange(view.count))
    alone = [view.origins(np.array([sequence])) for sequence in range(view.count)]
    for name in ("documents", "starts", "tokens", "per_sequence"):
        np.testing.assert_array_equal(getattr(together, name), np.concatenate([getattr(one, name) for one in alone]))
    assert len(view.origins(np.zeros(0, dtype=np.int64)).documents) == 0
