"""The layouts of HDF5 shards, and a set of shards that agree in one.

fixed      arrays of N rows, padded with zeros: input_ids, input_mask, segment_ids [N, S], masked_lm_positions,
           masked_lm_ids [N, P], next_sentence_labels [N]. NVIDIA's DeepLearningExamples (gzip, int32 ids) and MLPerf
           since v0.7 (int16 ids, gzip or not).
variable   the same without input_mask, a variable-length row each: input_ids, segment_ids, masked_lm_positions,
           masked_lm_ids; next_sentence_labels [N]. NVIDIA's MLPerf submissions since v1.0 ("varlength").
packed     variable rows of several sequences each, concatenated, positions counted from the row's beginning;
           packed_input_len and packed_masked_lm_len divide them, next_sentence_labels has one for each. NVIDIA's
           MLPerf submissions since v2.0 ("packed_data").

Layouts as in github.com/mlcommons/training_results_v1.1 to v4.0, NVIDIA/benchmarks/bert/.../input_preprocessing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from evenpack.errors import ConfigError, DataError

Layout = Literal["fixed", "variable", "packed"]

ROWS = ("input_ids", "segment_ids")
MASKS = ("masked_lm_positions", "masked_lm_ids")
LABELS = "next_sentence_labels"
PACKED = ("packed_input_len", "packed_masked_lm_len")
_FOREIGN = {"next_sentence_positions", "next_sentence_weights", "positions"}
"""Datasets of rows that other systems packed (Graphcore, Habana)."""


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
    layout: Layout
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
        first: tuple[Layout, int | None, int | None] | None = None
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


def _layout_of(file: Any, path: Path) -> Layout:
    h5py, names = import_h5py(), set(file.keys())
    foreign = sorted(_FOREIGN & names)
    if foreign:
        raise DataError(
            f"{path} has the dataset {foreign[0]}: its rows were packed by another system; give the shards that they "
            "were packed from"
        )
    layout: Layout = "fixed"
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


def datasets_of(layout: Layout) -> tuple[str, ...]:
    """Returns the names of a layout's datasets."""
    extra = {"fixed": ("input_mask",), "variable": (), "packed": PACKED}[layout]
    return (*ROWS, *extra, *MASKS, LABELS)


def _check_shapes(file: Any, layout: Layout, path: Path) -> tuple[int | None, int | None]:
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


def _describe(layout: Layout, row_slots: int | None, mask_slots: int | None) -> str:
    widths = f" with rows of {row_slots} slots and {mask_slots} masks" if layout == "fixed" else ""
    return f"it is of layout {layout}{widths}"
