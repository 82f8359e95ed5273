"""Files of lines, whole or divided into ranges of bytes that begin and end with a line."""

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import IO, TypeVar

from evenpack.data.sources.corpus import Document, make_document
from evenpack.data.sources.input_files import SourceReader, is_compressed

T = TypeVar("T")

_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class LineRange:
    """Consecutive lines of one file; by default the whole file."""

    path: Path
    begin: int = 0
    """The first byte, at the start of a line."""
    stop: int | None = None
    """The byte after the last line; None at the end of the file."""
    longest_line_bytes: int

    @property
    def name(self) -> str:
        return str(self.path) if self.stop is None else f"{self.path}, bytes {self.begin:,} to {self.stop:,}"

    @property
    def total_bytes(self) -> int:
        return (self.path.stat().st_size if self.stop is None else self.stop) - self.begin

    def open(self) -> SourceReader:
        """Opens the range. Raises: DataError if the file cannot be opened."""
        return SourceReader(self.path, begin=self.begin, stop=self.stop, longest_line_bytes=self.longest_line_bytes)

    def divided(
        self, target_bytes: int, *, ends_document: Callable[[bytes], bool] | None = None
    ) -> tuple["LineRange", ...]:
        """Divides a whole file into ranges of about equal size, at most `target_bytes` and a document, by seeking.

        A range ends after any line, or after one for which `ends_document` is true. A compressed file stays whole.
        """
        size = self.total_bytes
        if size <= target_bytes or is_compressed(self.path):
            return (self,)
        with self.path.open("rb") as file:
            inner = tuple(_bounds(file, size, count=-(-size // target_bytes), ends_document=ends_document))
        edges = (0, *inner, size)
        return tuple(replace(self, begin=begin, stop=stop) for begin, stop in pairwise(edges))


def _bounds(file: IO[bytes], size: int, *, count: int, ends_document: Callable[[bytes], bool] | None) -> Iterator[int]:
    """Yields the starts of lines that divide a file into `count` ranges, or fewer if documents are long."""
    bound = 0
    for number in range(1, count):
        position = size * number // count
        if position <= bound:
            continue
        file.seek(position - 1)
        _read_line(file, bytes.isspace)  # to the next line's beginning, which may be `position` itself
        while ends_document is not None and _read_line(file, ends_document) is False:
            pass
        bound = file.tell()
        if bound >= size:
            return
        yield bound


def _read_line(file: IO[bytes], holds: Callable[[bytes], bool]) -> bool | None:
    """Reads a line of any length, in pieces; returns whether `holds` is true of each of them, None at the end."""
    found = None
    while piece := file.readline(_PIECE_BYTES):
        found = found is not False and holds(piece)
        if piece.endswith(b"\n"):
            break
    return found


def documents_of(
    reader: SourceReader, entries: Iterator[T], text_of: Callable[[T], str], *, start: int, bytes_before: int
) -> Generator[Document, None, int]:
    """Yields the documents of a file; no text is made of the first `start` of them.

    Returns: how many documents are still to be skipped after this file.
    """
    for entry in entries:
        if start:
            start -= 1
        else:
            yield make_document(text_of(entry), bytes_before + reader.bytes_read, lambda: reader.where)
    return start
