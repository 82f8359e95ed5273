"""The columns of a token file of pairs, both of those made here and of imported ones."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Int64

from evenpack.data.config import MaskedPairsRecipe, SentencePairsRecipe
from evenpack.data.sequences import MaskedPairsView, SentencePairsView, TokenAccounting
from evenpack.data.sequences.static_masks import MASK_COLUMNS, MOST_MASKS, most_masks_by_length
from evenpack.data.tokens.array_file import write_array
from evenpack.data.tokens.file import TokenFile, column_path
from evenpack.data.tokens.writer import TokenFileWriter

PairsT = TypeVar("PairsT", bound=SentencePairsView)

PAIR_COLUMNS = {"first_segment_lengths": "<u2", "next_sentence_labels": "|u1"}
"""Columns of all pairs, by name and numpy's type; those with stored masks have `MASK_COLUMNS` too."""

_CHUNK_PAIRS = 1 << 20
"""Pairs whose masks are counted together."""


def begin_masks(writer: TokenFileWriter, columns: dict[str, str], state: dict[str, Any]) -> None:
    """Writes the first offset of stored masks, which no pair writes, unless `state` has it; `state` counts masks."""
    if "masks" not in state:
        nothing = {name: np.zeros(0, dtype=kind) for name, kind in columns.items()}
        no_pairs = np.zeros(0, dtype=np.int64)
        writer.append(no_pairs, no_pairs, {**nothing, "mask_offsets": np.zeros(1, dtype=np.int64)})
        state["masks"] = 0


def open_pairs(
    kind: type[PairsT],
    recipe: SentencePairsRecipe | MaskedPairsRecipe,
    token_file: TokenFile,
    accounting: TokenAccounting,
) -> PairsT:
    """Opens the view of a finished token file; with masks, `most_masks` is computed and stored with it."""
    names = [*PAIR_COLUMNS, *(MASK_COLUMNS if issubclass(kind, MaskedPairsView) else ())]
    columns = {name: _mapped(column_path(token_file.prefix, name)) for name in names}
    if issubclass(kind, MaskedPairsView):
        path = column_path(token_file.prefix, MOST_MASKS)
        lengths = (token_file.spans(chunk)[1] for chunk in _chunks(token_file.documents))
        write_array(path, most_masks_by_length(columns["mask_offsets"], lengths, longest=recipe.max_sequence_length))
        columns[MOST_MASKS] = _mapped(path)
    return kind(
        recipe=recipe,
        token_file=token_file,
        accounting=accounting,
        max_segments_per_sequence=1,
        directory=None,
        **columns,
    )


def _mapped(path: Path) -> np.ndarray:
    array: np.ndarray = np.load(path, mmap_mode="r").view(np.ndarray)
    return array


def _chunks(pairs: int) -> Iterator[Int64[np.ndarray, " chunk"]]:
    return (np.arange(start, min(start + _CHUNK_PAIRS, pairs)) for start in range(0, pairs, _CHUNK_PAIRS))
