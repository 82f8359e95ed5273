"""Masked sequences as shards, in the layouts `fixed` and `variable`.

`fixed` has the types of NVIDIA's DeepLearningExamples (int32 ids and positions, int8 for the others), compressed by
gzip, and zeros for padding whatever the vocabulary's [PAD]; `variable` has those of its MLPerf submissions (int16 ids
below a vocabulary of 32,768, else int32), which HDF5 does not compress.

Shapes: K = sequences, S = slots of a row, P = masks that fit a row, V = values.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Int64, Integer

from evenpack.data.shards.layout import LABELS, MASKS, ROWS, import_h5py
from evenpack.data.shards.masked_sequences import MaskedSequences

WrittenLayout = Literal["fixed", "variable"]

_CHUNK_ROWS = 256
"""Rows that are compressed together: half a megabyte of ids at 512 slots."""
_GZIP_LEVEL = 4


@dataclass(frozen=True, kw_only=True)
class ShardForm:
    """The common properties of a set's shards."""

    layout: WrittenLayout
    row_slots: int
    mask_slots: int
    vocabulary_size: int

    @property
    def types(self) -> dict[str, str]:
        """Numpy's name of each dataset's type."""
        is_small = self.layout == "variable" and max(self.vocabulary_size, self.row_slots) <= 1 << 15
        number = "<i2" if is_small else "<i4"
        return {
            **dict.fromkeys(("input_ids", *MASKS), number),
            **dict.fromkeys(("input_mask", "segment_ids", LABELS), "|i1"),
        }


class ShardWriter:
    """Writes one shard of a known number of rows."""

    def __init__(self, file: Any, form: ShardForm, rows: int) -> None:
        h5py = import_h5py()
        self._file = file
        self._form = form
        self._rows_written = 0
        for name, kind in form.types.items():
            if form.layout == "fixed":
                width = () if name == LABELS else (form.mask_slots if name in MASKS else form.row_slots,)
                chunks = (min(rows, _CHUNK_ROWS), *width)
                file.create_dataset(
                    name, (rows, *width), kind, chunks=chunks, compression="gzip", compression_opts=_GZIP_LEVEL
                )
            elif name != "input_mask":
                file.create_dataset(name, (rows,), kind if name == LABELS else h5py.vlen_dtype(np.dtype(kind)))

    def append(self, sequences: MaskedSequences) -> None:
        """Writes the next rows, which must fit the form."""
        here = slice(self._rows_written, self._rows_written + len(sequences.lengths))
        starts = np.repeat(sequences.ends - sequences.lengths, sequences.lengths)
        in_sequence = np.arange(len(sequences.tokens)) - starts
        is_second = in_sequence >= np.repeat(sequences.first_segment_lengths, sequences.lengths)
        lengths, counts = sequences.lengths, sequences.mask_counts
        self._write(ROWS[0], here, sequences.tokens, lengths)
        self._write(ROWS[1], here, is_second.astype(np.int8), lengths)
        self._write(MASKS[0], here, sequences.mask_places, counts)
        self._write(MASKS[1], here, sequences.mask_labels, counts)
        if self._form.layout == "fixed":
            self._write("input_mask", here, np.ones_like(sequences.tokens), lengths)
        self._file[LABELS][here] = sequences.next_sentence_labels
        self._rows_written = here.stop

    def _write(
        self, name: str, here: slice, values: Integer[np.ndarray, " V"], lengths: Int64[np.ndarray, " K"]
    ) -> None:
        dataset, typed = self._file[name], values.astype(self._form.types[name])
        if self._form.layout == "fixed":
            rows = np.zeros((len(lengths), dataset.shape[1]), dtype=typed.dtype)
            rows[np.arange(dataset.shape[1]) < lengths[:, None]] = typed
        else:
            rows = np.empty(len(lengths), dtype=object)
            for index, row in enumerate(np.split(typed, np.cumsum(lengths)[:-1])):
                rows[index] = row  # assigned one by one, since rows of one length would become a matrix
        dataset[here] = rows


@contextmanager
def new_shard(path: Path, form: ShardForm, rows: int) -> Iterator[ShardWriter]:
    """Writes a shard of so many rows, at least one, at `path`; the caller makes it atomic."""
    with import_h5py().File(path, "w") as file:
        yield ShardWriter(file, form, rows)
