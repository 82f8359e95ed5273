"""Masked sequences as shards, in the layouts `fixed` and `variable`, and the fixed evaluation set.

`fixed` has the types of NVIDIA's DeepLearningExamples (int32 ids and positions, int8 for the others), compressed by
gzip, and zeros for padding whatever the vocabulary's [PAD]; `variable` has those of its MLPerf submissions (int16 ids
below a vocabulary of 32,768, else int32), which HDF5 does not compress.

The evaluation set holds samples at equal distances among all rows of the evaluation text. MLPerf's rule is 10,000
samples of the rows of eval.txt (ten passes over it), the i-th of them row floor(i x N / 10,000) in double precision:
`cleanup_scripts/pick_eval_samples.py` of mlcommons/training, language_model/tensorflow/bert.

Shapes: K = sequences, S = slots of a row, P = masks that fit a row, V = values.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from jaxtyping import Int64, Integer

from evenpack.data.sequences.pairs import PairMasks
from evenpack.data.shards.reading import LABELS, MASKS, ROWS, MaskedSequences, ShardSet, import_h5py, read_slices
from evenpack.errors import ConfigError, DataError
from evenpack.files import atomic_path, require_folder
from evenpack.progress import Progress

_CHUNK_ROWS = 256
"""Rows that are compressed together: half a megabyte of ids at 512 slots."""
_GZIP_LEVEL = 4


WrittenLayout = Literal["fixed", "variable"]

PartT = TypeVar("PartT", MaskedSequences, PairMasks)


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
        lengths, masks = sequences.lengths, sequences.masks
        self._write(ROWS[0], here, sequences.tokens, lengths)
        self._write(ROWS[1], here, is_second.astype(np.int8), lengths)
        self._write(MASKS[0], here, masks.places, masks.counts)
        self._write(MASKS[1], here, masks.labels, masks.counts)
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


@dataclass(frozen=True, kw_only=True)
class PickedSet:
    """Counts of a picked set and of its source."""

    file: Path
    samples: int
    candidates: int
    layout: WrittenLayout


def evenly_spaced(candidates: int, samples: int) -> Int64[np.ndarray, " samples"]:
    """Returns ascending numbers of samples below `candidates`, by the rule above.

    Raises: DataError if there are too few.
    """
    if samples > candidates:
        raise DataError(
            f"{samples} samples cannot be picked from {candidates}: give all shards of the evaluation text, or pick "
            "fewer"
        )
    return (np.arange(samples) * (candidates / samples)).astype(np.int64)


def pick_evaluation_set(files: tuple[Path, ...], output: Path, *, samples: int, progress: Progress) -> PickedSet:
    """Writes the evaluation set of `files`, in order, in their layout; packed ones give a `variable` one.

    Only the picked rows are held in memory.

    Raises: DataError for shards that are wrong, or hold too few rows; ConfigError if `output` exists.
    """
    if output.exists():
        raise ConfigError(f"{output} exists; name another file or remove it")
    require_folder(output.parent, option="shards pick")
    shards = ShardSet.open(files)
    picked, candidates = _pick(shards, samples, progress)
    form = ShardForm(
        layout="fixed" if shards.layout == "fixed" else "variable",
        row_slots=shards.row_slots or int(picked.lengths.max()),
        mask_slots=shards.mask_slots or int(picked.masks.counts.max(initial=1)),
        vocabulary_size=1 + int(max(picked.tokens.max(), picked.masks.labels.max(initial=0))),
    )
    with atomic_path(output) as unfinished, new_shard(unfinished, form, samples) as writer:
        writer.append(picked)
    return PickedSet(file=output, samples=samples, candidates=candidates, layout=form.layout)


def _pick(shards: ShardSet, samples: int, progress: Progress) -> tuple[MaskedSequences, int]:
    """Returns the picked sequences and the number of candidates."""
    candidates = shards.rows if shards.layout != "packed" else _count(shards, progress)
    chosen = evenly_spaced(candidates, samples)
    piece = progress.begin("picking", unit="bytes")
    parts, before = [], 0
    for part in read_slices(shards):
        numbers = np.arange(before, before + len(part.sequences.lengths))
        parts.append(part.sequences.select(np.isin(numbers, chosen, assume_unique=True)))
        before += len(numbers)
        piece.update(part.bytes_read, shards.total_bytes, facts=[f"{before:,} rows"])
    masks = _concatenated([part.masks for part in parts])
    return _concatenated(parts, masks=masks), candidates


def _count(shards: ShardSet, progress: Progress) -> int:
    """Returns the sequences of packed rows, which no header counts."""
    piece, count = progress.begin("counting sequences", unit="bytes"), 0
    for part in read_slices(shards):
        count += len(part.sequences.lengths)
        piece.update(part.bytes_read, shards.total_bytes, facts=[f"{count:,} sequences"])
    return count


def _concatenated(parts: list[PartT], **given: Any) -> PartT:
    """Returns the arrays of all parts in one object of their type; `given` are its other fields."""
    kind = type(parts[0])
    names = [field.name for field in fields(kind) if field.name not in given]
    joined: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    return kind(**joined, **given)
