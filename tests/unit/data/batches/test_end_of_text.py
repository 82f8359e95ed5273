"""`end_of_text_in_loss: none` leaves out every end-of-text, in all recipes, and the plan counts what batches hold."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter
from token_files import END, numbered_tokens

from evenpack.data.recipes import Recipe
from evenpack.data.sequences import build_view
from evenpack.data.sequences.shuffled import SOURCE_IDS, ShuffledView
from evenpack.data.tokens.file import TokenFile
from evenpack.data.tokens.writer import TokenFileWriter

ROW = 8
LENGTHS = [4, 9, 30, 8, 3, 17, 12, 16, 1, 2, 25]

ROWS = [
    {"kind": "concat", "isolate_documents": False},
    {"kind": "concat", "isolate_documents": True},
    {"kind": "concat", "atom": 4, "isolate_documents": False},
    {"kind": "concat", "atom": 4, "isolate_documents": True},
    {"kind": "concat", "atom": 16, "isolate_documents": True},
    {"kind": "padding", "atom": 4, "isolate_documents": False},
    {"kind": "padding", "atom": 4, "isolate_documents": True},
    {"kind": "padding", "atom": 16, "isolate_documents": True},
]
"""Recipes whose sequences are rows of one length, but for the last."""

DOCUMENTS = [{"kind": "documents", "long_documents": policy} for policy in ("split", "truncate", "drop")]


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> TokenFile:
    """Documents of which each ends in END, which is nowhere else."""
    return numbered_tokens(tmp_path_factory.mktemp("ends") / "tokens", LENGTHS)


def view_of(token_file: TokenFile, recipe: dict[str, Any]) -> Any:
    common = {"max_sequence_length": ROW, "minimum_document_length": 2, "end_of_text_in_loss": "none"}
    settled = TypeAdapter(Recipe).validate_python({**common, **recipe})
    return build_view(settled, token_file, np.arange(len(LENGTHS)))


def named(recipe: dict[str, Any]) -> str:
    return "-".join(str(value) for value in recipe.values())


@pytest.mark.parametrize("recipe", [*ROWS, *DOCUMENTS], ids=named)
def test_every_end_of_text_is_left_out_and_counted_without_reading_tokens(
    token_file: TokenFile, recipe: dict[str, Any]
) -> None:
    view = view_of(token_file, recipe)
    ids, lengths = np.arange(view.count), view.lengths().astype(np.int64)
    content = view.read(ids)
    tokens, segment_lengths = content.tokens, content.counts.segment_lengths
    assert content.left_out.tolist() == (tokens == END).tolist()
    is_first = np.zeros(len(tokens), dtype=bool)
    is_first[np.cumsum(segment_lengths) - segment_lengths] = True
    is_target = (tokens != END) & ~is_first
    expected = np.add.reduceat(is_target, np.cumsum(lengths) - lengths, dtype=np.int64)
    assert view.counts(ids, lengths).targets.tolist() == content.counts.targets.tolist() == expected.tolist()
    for sequence in ids:  # the same of any choice of sequences
        one = np.array([sequence])
        assert view.counts(one, lengths[one]).targets.tolist() == [expected[sequence]]


def test_a_shuffled_view_leaves_out_the_ends_of_its_own_order(token_file: TokenFile, tmp_path: Path) -> None:
    view = view_of(token_file, {"kind": "documents"})
    order = np.random.default_rng(0).permutation(view.count)
    columns = {SOURCE_IDS: "<u4"}
    with TokenFileWriter(tmp_path / "shuffled", vocabulary_size=1000, columns=columns) as writer:
        writer.append(view.read(order).tokens, view.lengths()[order], {SOURCE_IDS: order.astype(np.uint32)})
        writer.finish()
    shuffled = ShuffledView(view, TokenFile(tmp_path / "shuffled"))
    asked = np.array([3, 0, view.count - 1])
    content = shuffled.read(asked)
    assert content.left_out is not None
    assert content.left_out.tolist() == (content.tokens == END).tolist()
    lengths = shuffled.lengths().astype(np.int64)[asked]
    ends = [int((shuffled.read(np.array([one])).tokens == END).sum()) for one in asked]
    expected = [length - 1 - (count if length > 1 else 0) for count, length in zip(ends, lengths, strict=True)]
    assert shuffled.counts(asked, lengths).targets.tolist() == content.counts.targets.tolist() == expected
