"""Writes HDF5 shards with h5py itself, dataset by dataset, in the three layouts of NVIDIA's pipelines."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np

from evenpack.data.manifest import SPLITS
from evenpack.data.prepared import PreparedData
from evenpack.data.sequences import MaskedPairsView
from evenpack.data.shards.reading import MaskedSequences
from evenpack.data.shards.writing import ShardForm, new_shard

CLS, SEP, MASK = 2, 3, 4
VOCABULARY_SIZE = 90
SLOTS, MASK_SLOTS = 24, 4


@dataclass(frozen=True, kw_only=True)
class Row:
    """A masked pair."""

    tokens: list[int]
    """As the model sees them."""
    first_length: int
    """Of [CLS] A [SEP]."""
    label: int
    places: list[int]
    originals: list[int]

    @property
    def segments(self) -> list[int]:
        return [int(place >= self.first_length) for place in range(len(self.tokens))]

    def unmasked(self) -> "Row":
        """Returns the pair before masking."""
        originals = dict(zip(self.places, self.originals, strict=True))
        tokens = [originals.get(place, token) for place, token in enumerate(self.tokens)]
        return replace(self, tokens=tokens, places=[], originals=[])


def random_rows(count: int, *, seed: int) -> list[Row]:
    """Returns pairs of 7 to `SLOTS` tokens with 0 to `MASK_SLOTS` masks."""
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        first, second = (int(length) for length in random.integers(2, (SLOTS - 3) // 2 + 1, size=2))
        tokens = random.integers(5, VOCABULARY_SIZE, size=first + second).tolist()
        pair = [CLS, *tokens[:first], SEP, *tokens[first:], SEP]
        ordinary = [place for place in range(1, len(pair) - 1) if place != first + 1]
        places = sorted(random.choice(ordinary, size=random.integers(0, MASK_SLOTS + 1), replace=False).tolist())
        originals = [pair[place] for place in places]
        for place in places:
            pair[place] = [MASK, int(random.integers(5, VOCABULARY_SIZE)), pair[place]][random.integers(3)]
        rows.append(
            Row(
                tokens=pair,
                first_length=first + 2,
                label=int(random.integers(2)),
                places=places,
                originals=originals,
            )
        )
    return rows


def fixed_arrays(rows: Sequence[Row]) -> dict[str, np.ndarray]:
    """Returns the six arrays of DeepLearningExamples."""

    def padded(values: list[list[int]], width: int, kind: str) -> np.ndarray:
        return np.array([row + [0] * (width - len(row)) for row in values], dtype=kind)

    return {
        "input_ids": padded([row.tokens for row in rows], SLOTS, "i4"),
        "input_mask": padded([[1] * len(row.tokens) for row in rows], SLOTS, "i1"),
        "segment_ids": padded([row.segments for row in rows], SLOTS, "i1"),
        "masked_lm_positions": padded([row.places for row in rows], MASK_SLOTS, "i4"),
        "masked_lm_ids": padded([row.originals for row in rows], MASK_SLOTS, "i4"),
        "next_sentence_labels": np.array([row.label for row in rows], dtype="i1"),
    }


def write_arrays(path: Path, arrays: dict[str, np.ndarray], *, chunk_rows: int | None = None) -> Path:
    """Writes arrays, compressed in chunks of the given number of rows; None: neither."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            chunks = None if chunk_rows is None else (chunk_rows, *array.shape[1:])
            compression = None if chunk_rows is None else "gzip"
            file.create_dataset(name, data=array, chunks=chunks, compression=compression)
    return path


def write_fixed(path: Path, rows: Sequence[Row], **changes: np.ndarray) -> Path:
    """Writes a compressed shard; `changes` replace whole arrays."""
    return write_arrays(path, fixed_arrays(rows) | changes, chunk_rows=min(5, len(rows)))


def variable_lists(rows: Sequence[Row]) -> dict[str, list[list[int]]]:
    """Writes the datasets of variable length, without the labels."""
    return {
        "input_ids": [row.tokens for row in rows],
        "segment_ids": [row.segments for row in rows],
        "masked_lm_positions": [row.places for row in rows],
        "masked_lm_ids": [row.originals for row in rows],
    }


def write_variable(path: Path, rows: Sequence[Row], **changes: list[list[int]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        _write_lists(file, variable_lists(rows) | changes)
        file.create_dataset("next_sentence_labels", data=np.array([row.label for row in rows], dtype="i1"))
    return path


def packed_lists(packs: Sequence[Sequence[Row]]) -> dict[str, list[list[int]]]:
    """Writes datasets of rows that hold several pairs, with positions counted from the beginning of the row."""
    lists: dict[str, list[list[int]]] = {name: [] for name in (*variable_lists([]), "next_sentence_labels")}
    lists |= {"packed_input_len": [], "packed_masked_lm_len": []}
    for pack in packs:
        starts = np.cumsum([0, *(len(row.tokens) for row in pack)]).tolist()
        lists["input_ids"].append([token for row in pack for token in row.tokens])
        lists["segment_ids"].append([segment for row in pack for segment in row.segments])
        places = [start + place for start, row in zip(starts, pack, strict=False) for place in row.places]
        lists["masked_lm_positions"].append(places)
        lists["masked_lm_ids"].append([token for row in pack for token in row.originals])
        lists["next_sentence_labels"].append([row.label for row in pack])
        lists["packed_input_len"].append([len(row.tokens) for row in pack])
        lists["packed_masked_lm_len"].append([len(row.places) for row in pack])
    return lists


def write_packed(path: Path, packs: Sequence[Sequence[Row]], **changes: list[list[int]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        _write_lists(file, packed_lists(packs) | changes)
    return path


def _write_lists(file: h5py.File, lists: dict[str, list[list[int]]]) -> None:
    for name, rows in lists.items():
        kind = "i1" if name in ("segment_ids", "next_sentence_labels") else "i2"
        dataset = file.create_dataset(name, (len(rows),), h5py.vlen_dtype(np.dtype(kind)))
        for index, row in enumerate(rows):
            dataset[index] = np.array(row, dtype=kind)


def write_prepared(prepared: PreparedData, directory: Path, form: ShardForm, *, rows_per_shard: int) -> None:
    """Writes pairs with stored masks into DIRECTORY/SOURCE/SPLIT, in their order, in shards of nearly equal size."""
    for source in prepared.source_names:
        for split in SPLITS:
            view, folder = prepared.view(source, split), directory / source / split
            assert isinstance(view, MaskedPairsView)
            folder.mkdir(parents=True)
            shards = -(-view.count // rows_per_shard)
            bounds = [view.count * shard // shards for shard in range(shards + 1)]
            for first, last in pairwise(bounds):
                with new_shard(folder / f"part_{first:05d}.hdf5", form, last - first) as shard:
                    shard.append(MaskedSequences.of_view(view, first, last))
