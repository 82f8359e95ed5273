"""Lists of sequence lengths, as people have them, become a histogram.

wikipedia_512           a published histogram (`studies/published.py`)
lengths.npy             one integer for each sequence, memory-mapped
lengths.txt, or -       integers separated by spaces or lines (standard input for -)
histogram.json          [n1, n2, ...] counts the sequences of length 1, 2, ...; {"17": n, ...} by length;
                        {"name": either, ...} several, of which one is chosen
"""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from evenpack.config import nearest
from evenpack.data.packing import LengthHistogram
from evenpack.errors import DataError
from evenpack.studies.published import published_histogram, published_names

LineReader = Callable[[int], list[bytes]]
"""`readlines` of a binary file: whole lines of about so many bytes in all."""

_LONGEST = 1 << 24
"""As long as a pack can be; guards the memory of a histogram against a stray number."""

_TEXT_BYTES = 1 << 24
"""Text read together."""


def read_histogram(source: str, *, name: str | None = None) -> LengthHistogram:
    """Counts the lengths in the file `source`, or of a published name, or of standard input (`-`).

    `name` chooses among several histograms in a JSON file.

    Raises: DataError with the place of what is wrong; PackingError for a length that no sequence has.
    """
    if name is not None and not source.endswith(".json"):
        raise DataError(f"{source} holds one list of lengths: only a .json file can have a histogram named '{name}'")
    if source in published_names():
        return published_histogram(source)
    if source == "-":
        return _from_text(sys.stdin.buffer.readlines, "standard input")
    path = Path(source)
    try:
        if path.suffix == ".npy":
            return _from_array(_load_array(path))
        if path.suffix == ".json":
            return _from_json(json.loads(path.read_text(encoding="utf-8")), source, name)
        with path.open("rb") as file:
            return _from_text(file.readlines, source)
    except OSError as error:
        raise DataError(
            f"{source} cannot be read: {error.strerror}; published histograms: {', '.join(published_names())}"
        ) from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{source} is no JSON: {error}") from error


def merge_histograms(histograms: list[LengthHistogram]) -> LengthHistogram:
    """Of all their sequences together."""
    counts = np.zeros(max(len(histogram.counts) for histogram in histograms), dtype=np.int64)
    for histogram in histograms:
        counts[: len(histogram.counts)] += histogram.counts
    return LengthHistogram(counts=counts)


def _load_array(path: Path) -> np.ndarray:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise DataError(f"{path} is no .npy file of numbers: {error}") from error
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in "iu":
        found = f"{array.dtype} of shape {array.shape}" if isinstance(array, np.ndarray) else "several arrays"
        raise DataError(f"{path}: expected one integer for each sequence, found {found}")
    return array


def _from_array(array: np.ndarray) -> LengthHistogram:
    return LengthHistogram.from_lengths(array, longest=_longest(array))


def _from_text(read_lines: LineReader, origin: str) -> LengthHistogram:
    counts = np.zeros(1, dtype=np.int64)
    for lengths in _parse_blocks(read_lines, origin):
        found = LengthHistogram.from_lengths(lengths, longest=_longest(lengths)).counts
        counts = np.pad(counts, (0, max(0, len(found) - len(counts))))
        counts[: len(found)] += found
    return LengthHistogram(counts=counts)


def _parse_blocks(read_lines: LineReader, origin: str) -> Iterator[Int64[np.ndarray, " block"]]:
    lines_before = 0
    for block in iter(lambda: read_lines(_TEXT_BYTES), []):
        words = b"".join(block).split()
        if words:
            try:
                yield np.array(words).astype(np.int64)
            except (ValueError, OverflowError) as error:
                raise DataError(_locate(block, lines_before, origin)) from error
        lines_before += len(block)


def _locate(block: list[bytes], lines_before: int, origin: str) -> str:
    """The message for the first word that is no integer."""
    for number, line in enumerate(block, lines_before + 1):
        for word in line.split():
            try:
                np.array([word]).astype(np.int64)
            except (ValueError, OverflowError):
                shown = word[:40].decode(errors="replace")
                return f"{origin}, line {number}: expected whole numbers, found '{shown}'"
    raise AssertionError("each word of the block is an integer")


def _from_json(values: Any, origin: str, name: str | None) -> LengthHistogram:
    if _is_counts(values):
        if name is not None:
            raise DataError(f"{origin} is a single histogram and has none named '{name}'")
        return LengthHistogram(counts=_counts(values, origin))
    if not isinstance(values, dict) or not values or not all(_is_counts(inner) for inner in values.values()):
        raise DataError(
            f'{origin}: expected counts by length ([n1, n2, ...] or {{"17": n, ...}}), or several of them by name'
        )
    if name is None:
        raise DataError(f"{origin} holds several histograms: choose one with --name; known: {', '.join(values)}")
    if name not in values:
        raise DataError(f"{origin} has no histogram named '{name}'; {nearest(name, list(values))}")
    return LengthHistogram(counts=_counts(values[name], f"{origin}, {name}"))


def _is_counts(values: Any) -> bool:
    if isinstance(values, dict):
        return bool(values) and all(key.isdecimal() and isinstance(inner, int) for key, inner in values.items())
    return isinstance(values, list) and bool(values) and all(isinstance(inner, int) for inner in values)


def _counts(values: Any, origin: str) -> Int64[np.ndarray, " longest"]:
    if isinstance(values, list):
        return np.array(values, dtype=np.int64)
    lengths = np.array([int(key) for key in values], dtype=np.int64)
    if lengths.min() < 1 or lengths.max() > _LONGEST:
        raise DataError(f"{origin}: a length must be from 1 to {_LONGEST}, found {lengths.min()} and {lengths.max()}")
    counts = np.zeros(int(lengths.max()), dtype=np.int64)
    np.add.at(counts, lengths - 1, np.array(list(values.values()), dtype=np.int64))
    return counts


def _longest(lengths: np.ndarray) -> int:
    """Upper end of a histogram of `lengths`; a length beyond all packs is left to fail by its index."""
    return max(1, min(int(lengths.max()), _LONGEST)) if len(lengths) else 1
