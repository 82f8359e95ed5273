"""HDF5 shards of finished, masked pairs: their layouts, and their rows, checked, some thousand at a time.

fixed      arrays of N rows, padded with zeros: input_ids, input_mask, segment_ids [N, S], masked_lm_positions,
           masked_lm_ids [N, P], next_sentence_labels [N]. NVIDIA's DeepLearningExamples (gzip, int32 ids) and MLPerf
           since v0.7 (int16 ids, gzip or not).
variable   the same without input_mask, a variable-length row each: input_ids, segment_ids, masked_lm_positions,
           masked_lm_ids; next_sentence_labels [N]. NVIDIA's MLPerf submissions since v1.0 ("varlength").
packed     variable rows of several sequences each, concatenated, positions counted from the row's beginning;
           packed_input_len and packed_masked_lm_len divide them, next_sentence_labels has one for each. NVIDIA's
           MLPerf submissions since v2.0 ("packed_data").

Layouts as in github.com/mlcommons/training_results_v1.1 to v4.0, NVIDIA/benchmarks/bert/.../input_preprocessing.

Shapes: R = rows, S = slots of a row, P = masks that fit a row, K = sequences, T = tokens, M = masked tokens.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Int64, Integer, UInt64

from evenpack.data.recipes import MaskedPairsRecipe
from evenpack.data.sequences import MaskedPairsView
from evenpack.data.sequences.pairs import PairMasks
from evenpack.data.tokenizers.special_tokens import PairTokens
from evenpack.data.tokens.file import hash_sequences
from evenpack.errors import ConfigError, DataError

ROWS = ("input_ids", "segment_ids")
MASKS = ("masked_lm_positions", "masked_lm_ids")
LABELS = "next_sentence_labels"
PACKED = ("packed_input_len", "packed_masked_lm_len")
_FOREIGN = {"next_sentence_positions", "next_sentence_weights", "positions"}
"""Datasets of rows that other systems packed (Graphcore, Habana)."""
ROWS_AT_ONCE = 2048
"""Rows read at once: some 10 MB of rows of 512 slots, a few times that while they are checked."""


ShardLayout = Literal["fixed", "variable", "packed"]


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One HDF5 file."""

    path: Path
    rows: int
    chunk_rows: int
    """Rows that are compressed together, and so read together; 1 where rows are not."""


@dataclass(frozen=True, kw_only=True)
class ShardSet:
    """Shards of one layout, in their order."""

    shards: tuple[Shard, ...]
    layout: ShardLayout
    row_slots: int | None
    """Slots of a row of `fixed`."""
    mask_slots: int | None
    """Masks that fit into a row of `fixed`."""

    @property
    def rows(self) -> int:
        return sum(shard.rows for shard in self.shards)

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return sum(shard.path.stat().st_size for shard in self.shards)

    @classmethod
    def open(cls, files: tuple[Path, ...]) -> "ShardSet":
        """Reads every file's header, and no row.

        Raises: DataError naming the file that is no such shard, or does not agree with the first; ConfigError
        without h5py.
        """
        first: tuple[ShardLayout, int | None, int | None] | None = None
        shards = []
        for path in files:
            with open_file(path) as file:
                layout = _layout_of(file, path)
                found = (layout, *_check_shapes(file, layout, path))
                chunks = file["input_ids"].chunks
                rows = file["input_ids"].shape[0]
                shards.append(Shard(path=path, rows=rows, chunk_rows=chunks[0] if chunks else 1))
            first = first or found
            if found != first:
                raise DataError(
                    f"{path} disagrees with {files[0]}: {_describe(*found)}, and the first shard {_describe(*first)}; "
                    "give shards of one shape, or a source for each shape"
                )
        assert first is not None, "a path leads to one file at least"
        if not any(shard.rows for shard in shards):
            raise DataError(f"{files[0]} and the {len(files) - 1} shards after it hold no row")
        return cls(shards=tuple(shards), layout=first[0], row_slots=first[1], mask_slots=first[2])


def import_h5py() -> Any:
    """Returns the module that reads and writes HDF5. Raises: ConfigError if it is not installed."""
    try:
        import h5py
    except ImportError as error:
        raise ConfigError(
            "HDF5 shards are read and written by h5py, which is not installed: pip install evenpack[mlperf]"
        ) from error
    return h5py


@contextmanager
def open_file(path: Path) -> Iterator[Any]:
    """Opens a shard as an `h5py.File`. Raises: DataError naming the file, also for errors of h5py within the block."""
    h5py = import_h5py()
    try:
        with h5py.File(path, "r") as file:
            yield file
    except (OSError, RuntimeError) as error:
        raise DataError(f"{path} is not readable as HDF5: {error}") from error


def _layout_of(file: Any, path: Path) -> ShardLayout:
    h5py, names = import_h5py(), set(file.keys())
    foreign = sorted(_FOREIGN & names)
    if foreign:
        raise DataError(
            f"{path} has the dataset {foreign[0]}: its rows were packed by another system; give the shards that they "
            "were packed from"
        )
    layout: ShardLayout = "fixed"
    if PACKED[0] in names:
        layout = "packed"
    elif "input_ids" in names and h5py.check_vlen_dtype(file["input_ids"].dtype) is not None:
        layout = "variable"
    missing = [name for name in datasets_of(layout) if name not in names]
    if missing:
        raise DataError(
            f"{path} lacks the dataset {missing[0]}: a shard of layout {layout} has {', '.join(datasets_of(layout))}, "
            f"this file {', '.join(sorted(names)) or 'nothing'}"
        )
    return layout


def datasets_of(layout: ShardLayout) -> tuple[str, ...]:
    """Returns the names of a layout's datasets."""
    extra = {"fixed": ("input_mask",), "variable": (), "packed": PACKED}[layout]
    return (*ROWS, *extra, *MASKS, LABELS)


def _check_shapes(file: Any, layout: ShardLayout, path: Path) -> tuple[int | None, int | None]:
    """Returns the slots of a row and of its masks. Raises: DataError for datasets of wrong types or unequal shapes."""
    h5py = import_h5py()
    rows = file["input_ids"].shape[:1]
    widths = tuple(file[name].shape[1:] for name in ("input_ids", MASKS[0]))
    for name in datasets_of(layout):
        dataset = file[name]
        element = h5py.check_vlen_dtype(dataset.dtype)
        is_variable = layout == "packed" or (layout == "variable" and name != LABELS)
        if (element or dataset.dtype).kind not in "iu" or (element is not None) != is_variable:
            kind = "variable-length rows of integers" if is_variable else "integers"
            raise DataError(f"{path}: {name} must hold {kind}, found {dataset.dtype}")
        width: tuple[int, ...] = ()
        if layout == "fixed" and name != LABELS:
            width = widths[name in MASKS]
        if dataset.shape != (*rows, *width) or len(width) != (layout == "fixed" and name != LABELS):
            raise DataError(
                f"{path}: {name} has the shape {dataset.shape} with input_ids of {file['input_ids'].shape} and "
                f"{MASKS[0]} of {file[MASKS[0]].shape}; a shard of layout {layout} has a row of equal width in each"
            )
    return (widths[0][0], widths[1][0]) if layout == "fixed" else (None, None)


def _describe(layout: ShardLayout, row_slots: int | None, mask_slots: int | None) -> str:
    widths = f" with rows of {row_slots} slots and {mask_slots} masks" if layout == "fixed" else ""
    return f"it is of layout {layout}{widths}"


@dataclass(frozen=True, kw_only=True, eq=False)
class MaskedSequences:
    """K sequences, concatenated; with the columns of `MaskedPairsView`."""

    tokens: Integer[np.ndarray, " T"]
    """Tokens as the model sees them: [MASK], a random token or the original one at each masked position."""
    lengths: Int64[np.ndarray, " K"]
    first_segment_lengths: Int64[np.ndarray, " K"]
    """Tokens of [CLS] A [SEP]; the others are of the other token type."""
    next_sentence_labels: Int64[np.ndarray, " K"]
    masks: PairMasks

    @classmethod
    def of_view(cls, view: MaskedPairsView, first: int, last: int) -> "MaskedSequences":
        """Returns the sequences `first` to `last` of a prepared split."""
        content = view.read(np.arange(first, last))
        assert content.mask_places is not None, "of masked pairs"
        assert content.mask_labels is not None, "of masked pairs"
        return cls(
            tokens=content.tokens,
            lengths=content.lengths,
            first_segment_lengths=view.first_segment_lengths[first:last].astype(np.int64),
            next_sentence_labels=view.next_sentence_labels[first:last].astype(np.int64),
            masks=PairMasks(counts=content.counts.targets, places=content.mask_places, labels=content.mask_labels),
        )

    @property
    def ends(self) -> Int64[np.ndarray, " K"]:
        """Returns the end of each sequence, one past its last token."""
        return np.cumsum(self.lengths)

    def restored_tokens(self) -> Integer[np.ndarray, " T"]:
        """Returns the tokens before masking."""
        tokens = self.tokens.copy()
        tokens[np.repeat(self.ends - self.lengths, self.masks.counts) + self.masks.places] = self.masks.labels
        return tokens

    def identities(self) -> UInt64[np.ndarray, " K"]:
        """Returns the hash of each sequence before masking, for any type of tokens; duplicates share it."""
        return hash_sequences(self.restored_tokens(), self.lengths)

    def select(self, chosen: Bool[np.ndarray, " K"]) -> "MaskedSequences":
        """Returns the chosen sequences, in their order."""
        return MaskedSequences(
            tokens=self.tokens[np.repeat(chosen, self.lengths)],
            lengths=self.lengths[chosen],
            first_segment_lengths=self.first_segment_lengths[chosen],
            next_sentence_labels=self.next_sentence_labels[chosen],
            masks=self.masks.select(chosen),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class RawSequences:
    """K sequences as read from a shard, with their rows."""

    path: Path
    rows: Int64[np.ndarray, " K"]
    tokens: Integer[np.ndarray, " T"]
    lengths: Int64[np.ndarray, " K"]
    segment_ids: Integer[np.ndarray, " T"]
    next_sentence_labels: Int64[np.ndarray, " K"]
    masks: PairMasks

    def place(self, sequence: int) -> str:
        """Returns a description of file and row, and of the sequence in a row of several."""
        row = self.rows[sequence]
        before = np.searchsorted(self.rows, row)
        is_alone = np.count_nonzero(self.rows == row) == 1
        part = "" if is_alone else f", sequence {sequence - before}"
        return f"{self.path}, row {row} (from 0){part}"


def checked(raw: RawSequences) -> MaskedSequences:
    """Returns the sequences, if each is a masked pair.

    Raises: DataError naming file and row of an empty sequence, segments that are not zeros followed by ones, a label
    that is neither 0 nor 1, or masked positions that do not ascend, are [CLS]'s, or are beyond the sequence's end.
    """
    if (bad := _first(raw.lengths < 1)) is not None:
        raise DataError(f"{raw.place(bad)}: it holds no token")
    starts = np.cumsum(raw.lengths) - raw.lengths
    first_lengths = np.add.reduceat(raw.segment_ids == 0, starts, dtype=np.int64) if len(starts) else raw.lengths
    place_in_sequence = np.arange(len(raw.tokens)) - np.repeat(starts, raw.lengths)
    expected_segments = place_in_sequence >= np.repeat(first_lengths, raw.lengths)
    if (bad := _first_part(raw.segment_ids != expected_segments, raw.lengths)) is not None:
        raise DataError(f"{raw.place(bad)}: segment_ids is not zeros followed by ones")
    labels = raw.next_sentence_labels
    if (bad := _first((labels != 0) & (labels != 1))) is not None:
        raise DataError(f"{raw.place(bad)}: next_sentence_labels is {labels[bad]}, expected 0 or 1")
    _check_places(raw)
    return MaskedSequences(
        tokens=raw.tokens,
        lengths=raw.lengths,
        first_segment_lengths=first_lengths,
        next_sentence_labels=labels,
        masks=raw.masks,
    )


def check_limits(
    part: "ShardSlice", recipe: MaskedPairsRecipe, *, vocabulary_size: int, pair_tokens: PairTokens | None
) -> None:
    """Checks that sequences keep the limits of a run's recipe and vocabulary.

    Args:
        pair_tokens: special tokens of pairs; None where only the vocabulary's size is known.

    Raises: DataError naming file and row of the first sequence that is too long, has more masks than the cap, holds
    an id outside the vocabulary, or does not begin and end with the vocabulary's [CLS] and [SEP].
    """
    sequences, place = part.sequences, part.place
    lengths, counts = sequences.lengths, sequences.masks.counts
    if (bad := _first(lengths > recipe.max_sequence_length)) is not None:
        raise DataError(
            f"{place(bad)}: it has {lengths[bad]} tokens, and data.recipe.max_sequence_length is "
            f"{recipe.max_sequence_length}"
        )
    if (bad := _first(counts > recipe.max_predictions)) is not None:
        raise DataError(
            f"{place(bad)}: it has {counts[bad]} masked tokens, and data.recipe.max_predictions is "
            f"{recipe.max_predictions}"
        )
    for name, ids, parts in (
        ("input_ids", sequences.tokens, lengths),
        ("masked_lm_ids", sequences.masks.labels, counts),
    ):
        outside = (ids < 0) | (ids >= vocabulary_size)
        if (bad := _first_part(outside, parts)) is not None:
            raise DataError(
                f"{place(bad)}: {name} has token id {ids[outside][0]}, and the vocabulary has "
                f"{vocabulary_size} entries: give the vocabulary that the shards were made with"
            )
    if pair_tokens is not None:
        _check_ends(sequences, pair_tokens, place)


def _check_ends(sequences: MaskedSequences, special: PairTokens, place: Callable[[int], str]) -> None:
    ends = sequences.ends
    for role, wanted, places in (
        ("begins with [CLS]", special.classification_id, ends - sequences.lengths),
        ("ends with [SEP]", special.separator_id, ends - 1),
    ):
        found = sequences.tokens[places]
        if (bad := _first(found != wanted)) is not None:
            raise DataError(
                f"{place(bad)}: a pair {role}, which is {wanted} in this run's vocabulary, found {found[bad]}: give "
                "the vocabulary that the shards were made with"
            )


def _check_places(raw: RawSequences) -> None:
    """Checks masked positions; position 0, which pads shards of fixed width, is [CLS]'s, which is never masked."""
    places, counts = raw.masks.places, raw.masks.counts
    outside = (places < 1) | (places >= np.repeat(raw.lengths, counts))
    if (bad := _first_part(outside, counts)) is not None:
        raise DataError(
            f"{raw.place(bad)}: masked_lm_positions has {places[outside][0]}, counted from the sequence's beginning; "
            f"the sequence has {raw.lengths[bad]} tokens, the first of which is never masked"
        )
    same_sequence = np.diff(np.repeat(np.arange(len(counts)), counts)) == 0
    falls = np.append(False, (np.diff(places) <= 0) & same_sequence)[: len(places)]
    if (bad := _first_part(falls, counts)) is not None:
        raise DataError(f"{raw.place(bad)}: masked_lm_positions does not ascend")


def _first(wrong: Bool[np.ndarray, " K"]) -> int | None:
    (bad,) = np.nonzero(wrong)
    return int(bad[0]) if len(bad) else None


def _first_part(wrong: Bool[np.ndarray, " N"], parts: Int64[np.ndarray, " K"]) -> int | None:
    """Returns the first of K parts, into which N values are divided, that has a wrong value."""
    bad = _first(wrong)
    return None if bad is None else int(np.searchsorted(np.cumsum(parts), bad, side="right"))


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardSlice:
    """Some consecutive rows of the set."""

    sequences: MaskedSequences
    place: Callable[[int], str]
    """Returns a description of file and row of the n-th of these sequences."""
    rows_read: int
    """Rows read of the whole set, including these."""
    bytes_read: int
    """Bytes read of `ShardSet.total_bytes`, in proportion to the rows of the file."""


def read_slices(shards: ShardSet, start: int = 0) -> Iterator[ShardSlice]:
    """Yields the set's rows from number `start` on; earlier rows are not read.

    Raises: DataError naming file and row for a row that cannot be a masked pair.
    """
    rows_before = bytes_before = 0
    for shard in shards.shards:
        size = shard.path.stat().st_size
        first = max(0, start - rows_before)
        if first < shard.rows:
            with open_file(shard.path) as file:
                for begin, end in _ranges(first, shard.rows, shard.chunk_rows):
                    raw = _read(file, shards.layout, begin, end, shard.path)
                    yield ShardSlice(
                        sequences=checked(raw),
                        place=raw.place,
                        rows_read=rows_before + end,
                        bytes_read=bytes_before + size * end // shard.rows,
                    )
        rows_before += shard.rows
        bytes_before += size


def _ranges(first: int, rows: int, chunk_rows: int) -> Iterator[tuple[int, int]]:
    """Yields ranges of whole chunks, so that none is decompressed twice."""
    at_once = max(1, ROWS_AT_ONCE // chunk_rows) * chunk_rows
    while first < rows:
        end = min((first // at_once + 1) * at_once, rows)
        yield first, end
        first = end


_Flat = dict[str, tuple[np.ndarray, Int64[np.ndarray, " R"]]]
"""The values of each dataset, row after row, and how many each row has."""


def _read(file: Any, layout: ShardLayout, begin: int, end: int, path: Path) -> RawSequences:
    """Reads rows of any layout: as rows of one sequence each, unless they are packed."""
    found = {name: file[name][begin:end] for name in datasets_of(layout)}
    if layout == "fixed":
        flat = _without_padding(found, begin, path)
    else:
        flat = {name: (_joined(rows), _lengths(rows)) for name, rows in found.items() if name != LABELS}
    if layout == "packed":
        labels, (lengths, sequences), (counts, _) = _joined(found[LABELS]), *(flat[name] for name in PACKED)
        _check_divisions(flat, _lengths(found[LABELS]), begin, path)
    else:
        labels, lengths, counts = found[LABELS], flat[ROWS[0]][1], flat[MASKS[0]][1]
        sequences = np.ones(end - begin, dtype=np.int64)
    lengths, counts = lengths.astype(np.int64), counts.astype(np.int64)
    row_of_sequence = np.repeat(np.arange(end - begin), sequences)
    divisions = PACKED if layout == "packed" else (ROWS[0], MASKS[0])
    for parts, division, names in ((lengths, divisions[0], ROWS), (counts, divisions[1], MASKS)):
        sums = np.bincount(row_of_sequence, weights=parts, minlength=end - begin)
        for name in names:
            _refuse(flat[name][1] != sums, begin, path, f"{name} is not as long as {division} says")
    starts = np.cumsum(lengths) - lengths
    row_starts = np.cumsum(flat[ROWS[0]][1]) - flat[ROWS[0]][1]
    places = flat[MASKS[0]][0].astype(np.int64) - np.repeat(starts - row_starts[row_of_sequence], counts)
    return RawSequences(
        path=path,
        rows=begin + row_of_sequence,
        tokens=flat[ROWS[0]][0],
        lengths=lengths,
        segment_ids=flat[ROWS[1]][0],
        next_sentence_labels=labels.astype(np.int64),
        masks=PairMasks(counts=counts, places=places, labels=flat[MASKS[1]][0].astype(np.int64)),
    )


def _without_padding(found: dict[str, np.ndarray], begin: int, path: Path) -> _Flat:
    """Returns rows of fixed width without their padding. Raises: DataError for padding within a row."""
    filled, places = found["input_mask"], found[MASKS[0]]
    lengths, counts = np.count_nonzero(filled, axis=1), np.count_nonzero(places, axis=1)
    is_token = np.arange(filled.shape[1]) < lengths[:, None]
    is_mask = np.arange(places.shape[1]) < counts[:, None]
    _refuse((filled != is_token).any(axis=1), begin, path, "input_mask is not ones followed by zeros")
    _refuse(
        ((places != 0) != is_mask).any(axis=1), begin, path, "masked_lm_positions has a position after its padding (0)"
    )
    tokens = {name: (found[name][is_token], lengths) for name in ROWS}
    return tokens | {name: (found[name][is_mask], counts) for name in MASKS}


def _check_divisions(flat: _Flat, labels: Int64[np.ndarray, " R"], begin: int, path: Path) -> None:
    """Checks what divides packed rows, of which each has so many labels."""
    for name, least in ((PACKED[0], 1), (PACKED[1], 0)):
        values, per_row = flat[name]
        too_few = np.bincount(
            np.repeat(np.arange(len(per_row)), per_row), weights=values < least, minlength=len(per_row)
        )
        _refuse(too_few > 0, begin, path, f"{name} has a value below {least}")
    for name, per_row in ((PACKED[1], flat[PACKED[1]][1]), (LABELS, labels)):
        _refuse(per_row != flat[PACKED[0]][1], begin, path, f"{name} has not one value for each {PACKED[0]}")


def _lengths(rows: np.ndarray) -> Int64[np.ndarray, " R"]:
    """Returns the lengths of variable-length rows."""
    return np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))


def _joined(rows: np.ndarray) -> np.ndarray:
    return np.concatenate(rows) if len(rows) else np.zeros(0, dtype=np.int64)


def _refuse(wrong: np.ndarray, begin: int, path: Path, problem: str) -> None:
    """Raises: DataError naming the first of the rows for which `wrong` holds."""
    if (bad := _first(wrong)) is not None:
        raise DataError(f"{path}, row {begin + bad} (from 0): {problem}")
