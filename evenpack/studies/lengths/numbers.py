"""Files of bare integers: .npy and text. They are lengths, or the counts of a histogram."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Int64

from evenpack.data.packing import LengthHistogram
from evenpack.errors import DataError
from evenpack.studies.lengths.counter import LONGEST, LengthCounter

LineReader = Callable[[int], list[bytes]]
"""`readlines` of a binary file: whole lines of about so many bytes in all."""

_TEXT_BYTES = 1 << 24
"""Text read together."""


def from_array(path: Path, *, are_counts: bool) -> LengthHistogram:
    """Of a .npy file, memory-mapped.

    Raises: DataError if it holds no list of integers; PackingError with the index of a wrong one.
    """
    array = _load_array(path)
    if are_counts:
        return _from_counts(array, str(path))
    longest = int(array.max()) if len(array) else 1
    return LengthHistogram.from_lengths(array, longest=max(1, min(longest, LONGEST)))


def from_text(read_lines: LineReader, origin: str, *, are_counts: bool) -> LengthHistogram:
    """Of integers between white space. Raises: DataError with the place of what is none, or is no length."""
    if are_counts:
        return _from_counts(_gather_counts(read_lines, origin), origin)
    counter = LengthCounter()
    for numbers in _parse_blocks(read_lines, origin):
        counter.add(numbers, _index_namer(origin, counter.sequences))
    return counter.histogram(origin)


def _index_namer(origin: str, first: int) -> Callable[[int], str]:
    return lambda index: f"{origin}, index {first + index}"


def _load_array(path: Path) -> np.ndarray:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise DataError(f"{path} is no .npy file of numbers: {error}") from error
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in "iu":
        found = f"{array.dtype} of shape {array.shape}" if isinstance(array, np.ndarray) else "several arrays"
        raise DataError(f"{path}: expected one integer for each sequence (or length, of a histogram), found {found}")
    return array


def _gather_counts(read_lines: LineReader, origin: str) -> Int64[np.ndarray, " counts"]:
    blocks = [np.zeros(0, dtype=np.int64)]
    for numbers in _parse_blocks(read_lines, origin):
        blocks.append(numbers)
        _refuse_too_many(sum(map(len, blocks)), origin)
    return np.concatenate(blocks)


def _from_counts(counts: np.ndarray, origin: str) -> LengthHistogram:
    _refuse_too_many(len(counts), origin)
    return LengthHistogram.from_counts(counts)


def _refuse_too_many(count: int, origin: str) -> None:
    if count > LONGEST:
        raise DataError(
            f"{origin} holds more than {LONGEST} numbers: too many for a histogram, whose last one is the longest "
            "length; if they are lengths leave --histogram out"
        )


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
