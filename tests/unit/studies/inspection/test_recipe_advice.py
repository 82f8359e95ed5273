"""The recipe that `inspect` recommends, and the figures behind it."""

from pathlib import Path

import numpy as np
import pytest

from evenpack.data.packing import LengthHistogram
from evenpack.data.recipes import ConcatRecipe, DocumentsRecipe, PaddingRecipe
from evenpack.data.sequences import build_view
from evenpack.data.tokens.file import TokenFile
from evenpack.data.tokens.writer import TokenFileWriter
from evenpack.studies.inspection.inspect import advise_recipe

LENGTHS = [2, 9, 17, 33, 34, 64, 100, 31, 32, 5, 5, 48, 200]
ROW = 32


def histogram_of(lengths: list[int]) -> LengthHistogram:
    return LengthHistogram.from_lengths(lengths, longest=max(lengths))


def test_rows_and_padding_are_those_that_the_recipes_make(tmp_path: Path) -> None:
    with TokenFileWriter(tmp_path / "tokens", vocabulary_size=100) as writer:
        tokens = np.ones(sum(LENGTHS), dtype=np.int64)
        writer.append(tokens, np.array(LENGTHS), {"document_hashes": np.zeros(len(LENGTHS), dtype=np.uint64)})
        writer.finish()
    file, documents = TokenFile(tmp_path / "tokens"), np.arange(len(LENGTHS))
    concat = build_view(ConcatRecipe(kind="concat", max_sequence_length=ROW), file, documents)
    padding = build_view(PaddingRecipe(kind="padding", max_sequence_length=ROW, atom=ROW), file, documents)
    pieces = build_view(DocumentsRecipe(kind="documents", max_sequence_length=ROW), file, documents)
    costs = {cost.recipe: cost for cost in advise_recipe(histogram_of(LENGTHS), max_sequence_length=ROW).costs}

    assert costs["concat"].rows == concat.count
    assert costs["padding"].rows == padding.count
    assert costs["padding"].padding_share == pytest.approx(padding.accounting.padding_slots / (padding.count * ROW))
    assert costs["documents"].rows >= -(-int(pieces.lengths().sum()) // ROW)
    assert costs["padding"].steps_over_concat == padding.count / concat.count


@pytest.mark.parametrize(
    ("lengths", "data", "time"),
    [
        ([*range(40, 140)] * 3, "documents", "documents"),
        ([20] * 200, "documents", "concat"),  # packs of whole documents of 20 in rows of 32 leave 12 slots each
        ([16] * 200, "documents", "documents"),
    ],
)
def test_the_advice_goes_by_what_is_scarce(lengths: list[int], data: str, time: str) -> None:
    advice = advise_recipe(histogram_of(lengths), max_sequence_length=ROW)

    assert (advice.scarce_data, advice.scarce_time) == (data, time)
    assert advice.mean_document_length == np.mean(lengths)
    assert "Which of them trains the better model is not shown" in advice.scarce_data_reason
    assert f"documents are {'longer' if np.mean(lengths) > ROW else 'shorter'} than rows" in advice.scarce_data_reason
