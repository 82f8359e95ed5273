"""Files of integers: .npy and text. They are lengths, or the counts of a histogram."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Int64

from evenpack.data.limits import MOST_SLOTS
from evenpack.data.packing import LengthHistogram
from evenpack.errors import DataError, PackingError
from evenpack.studies.lengths.counter import LengthCounter

Read = Callable[[int], bytes]
"""The `read` of a binary file: so many bytes, fewer at its end, then none."""

_TEXT_BYTES = 1 << 20
"""Bytes of text parsed together; 4 MiB are no faster."""

_ARRAY_NUMBERS = 1 << 20
"""Numbers of a mapped array counted together."""

_LONGEST_WORD = 64
"""Bytes kept from one part of a text to the next. No number needs more."""

_ALPHABET = b"0123456789- \t\n\r\v\f"


def from_array(path: Path, *, are_counts: bool) -> LengthHistogram:
    """Reads a .npy file, memory-mapped.

    Raises: DataError if it holds no list of integers; names the index of a wrong one.
    """
    array, origin = _load_array(path), str(path)
    if are_counts:
        return _from_counts(array, origin)
    counter = LengthCounter()
    for start in range(0, len(array), _ARRAY_NUMBERS):
        counter.add(array[start : start + _ARRAY_NUMBERS], _index_namer(origin, start))
    return counter.histogram(origin)


def from_text(read: Read, origin: str, *, are_counts: bool) -> LengthHistogram:
    """Reads integers between white space. Raises: DataError with the position of one that is invalid, or no length."""
    if are_counts:
        return _from_counts(_gather_counts(read, origin), origin)
    counter = LengthCounter()
    for numbers in _parse_parts(read, origin):
        counter.add(numbers, _index_namer(origin, counter.sequences))
    return counter.histogram(origin)


def _index_namer(origin: str, first: int) -> Callable[[int], str]:
    return lambda index: f"{origin}, index {first + index}"


def _load_array(path: Path) -> np.ndarray:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise DataError(f"{path} is not an .npy file of numbers: {error}") from error
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in "iu":
        found = f"{array.dtype} of shape {array.shape}" if isinstance(array, np.ndarray) else "several arrays"
        raise DataError(f"{path}: expected one integer for each sequence (or length, of a histogram), found {found}")
    return array


def _gather_counts(read: Read, origin: str) -> Int64[np.ndarray, " counts"]:
    parts, count = [np.zeros(0, dtype=np.int64)], 0
    for numbers in _parse_parts(read, origin):
        parts.append(numbers)
        count += len(numbers)
        _refuse_too_many(count, origin)
    return np.concatenate(parts)


def _from_counts(counts: np.ndarray, origin: str) -> LengthHistogram:
    _refuse_too_many(len(counts), origin)
    try:
        return LengthHistogram.from_counts(counts)
    except PackingError as error:
        raise DataError(f"{origin}: {error}") from error


def _refuse_too_many(count: int, origin: str) -> None:
    if count > MOST_SLOTS:
        raise DataError(
            f"{origin} holds more than {MOST_SLOTS} numbers: too many for a histogram, whose last one is the longest "
            "length; if they are lengths leave --histogram out"
        )


def _parse_parts(read: Read, origin: str) -> Iterator[Int64[np.ndarray, " part"]]:
    lines_before = 0
    for text in _whole_words(read):
        try:
            numbers = _parse(text)
        except ValueError as error:
            raise DataError(_locate(text, lines_before, origin)) from error
        yield numbers
        lines_before += text.count(b"\n")


def _whole_words(read: Read) -> Iterator[bytes]:
    """Yields a text in parts that end at a word boundary, or within a word that is too long for a number."""
    kept = b""
    for block in iter(lambda: read(_TEXT_BYTES), b""):
        text = kept + block
        kept = b"" if text[-1:].isspace() else text.rsplit(None, 1)[-1]
        if len(kept) > _LONGEST_WORD:
            kept = b""
        yield text[: len(text) - len(kept)]
    yield kept


def _parse(text: bytes) -> Int64[np.ndarray, " words"]:
    """Parses integers. Raises: ValueError for a word that is not an int64 in decimal digits."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if text.translate(None, _ALPHABET):  # Arrow would take 0x10 for 16
        raise ValueError("there are other characters than digits, minus and white space")
    if not text.strip():
        return np.zeros(0, dtype=np.int64)
    words = pc.list_flatten(pc.ascii_split_whitespace(pa.array([text.strip()], pa.string())))
    if pc.max(pc.binary_length(words)).as_py() > _LONGEST_WORD:
        raise ValueError(f"a word is longer than {_LONGEST_WORD} bytes")
    return np.asarray(pc.cast(words, pa.int64()))


def _locate(text: bytes, lines_before: int, origin: str) -> str:
    """Returns the message for the first word that is not an integer."""
    for number, line in enumerate(text.split(b"\n"), lines_before + 1):
        for word in line.split():
            try:
                _parse(word)
            except ValueError:
                shown = word[:40].decode(errors="replace")
                return f"{origin}, line {number}: expected whole numbers, found {shown!r}"
    raise AssertionError("each word of the text is an integer")
