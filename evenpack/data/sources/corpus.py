"""The interface that every kind of source has: documents, one after another, whatever their storage.

`documents(start)` skips the first `start` documents with as little parsing as possible, so that an interrupted
`prepare` can be resumed. Each error in a file is a DataError that names the file and the line or row.

A corpus of files reads pieces of them one after the other, and its parts consist of such pieces.
"""

from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar, runtime_checkable

import numpy as np
import xxhash

from evenpack.data.ranges import cut
from evenpack.data.sources.files import InputFile
from evenpack.errors import DataError

SectionT = TypeVar("SectionT")


@dataclass(slots=True)
class Document:
    """One document and its properties without tokens."""

    text: str
    text_bytes: int
    """Bytes of the text in UTF-8."""
    identity: int
    """xxh3_64 of the text in UTF-8, which identifies equal documents and decides the validation split."""
    bytes_read: int
    """Bytes of the source's files read so far, including this document; at most `Corpus.total_bytes`."""
    is_held_out: bool | None
    """Whether the document is one for validation, if the source's section names these; None if a hash decides."""
    where: Callable[[], str] = field(compare=False, repr=False)
    """Names its place in the source, until the next document is read."""

    @property
    def stored_identity(self) -> int:
        """The identity whose lowest bit is `is_held_out`, if that is known (`held_out` reads it there)."""
        return self.identity if self.is_held_out is None else self.identity & ~1 | self.is_held_out


@runtime_checkable
class CorpusPart(Protocol):
    """Consecutive documents of a source, which can be read without the earlier ones. A part can be pickled.

    `documents` and `Document.bytes_read` count from the part's own beginning.
    """

    @property
    def total_bytes(self) -> int:
        """Bytes of the files; the last `Document.bytes_read`, unless later content holds no document."""

    def documents(self, start: int = 0) -> Iterator[Document]:
        """Yields documents from number `start` on, always in the same order. Raises: DataError with file and line."""


@runtime_checkable
class Corpus(CorpusPart, Protocol):
    """The documents of one source."""

    def parts(self, target_bytes: int) -> tuple[CorpusPart, ...]:
        """Returns parts whose documents, one part after the other, are `documents()`.

        A part has about `target_bytes` of the files, or less; more if a document or an indivisible unit (a compressed
        file, a row group) has more. Their `total_bytes` add up to the corpus's. The same files give the same
        parts.
        """


@dataclass(frozen=True, kw_only=True)
class SourceKind(Generic[SectionT]):
    """A kind of source: functions of its section of the run file and the source's name."""

    open_corpus: Callable[[str, SectionT], Corpus]
    """Finds its files and reads none of them. Raises: DataError if the path is missing or leads to no file."""
    inputs: Callable[[str, SectionT], tuple[InputFile, ...]]
    """Returns its files as they are now. Raises: DataError as `open_corpus`."""
    recognised_endings: tuple[str, ...] = ()
    """Endings of files' names that show text of this kind, where nobody names it; (): it is always named."""


def make_document(text: str, bytes_read: int, where: Callable[[], str], *, is_held_out: bool | None = None) -> Document:
    """Makes the document of a text; `where` gives its position for messages.

    Raises: DataError for half of a surrogate pair, which JSON can hold and UTF-8 cannot.
    """
    try:
        encoded = text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where()}: the text holds half of a surrogate pair at character {error.start} and is not valid Unicode"
        ) from error
    return Document(text, len(encoded), xxhash.xxh3_64_intdigest(encoded), bytes_read, is_held_out, where)


@runtime_checkable
class Piece(Protocol):
    """A file, or a range of one that can be read without the earlier content. It can be pickled."""

    @property
    def total_bytes(self) -> int:
        """Bytes of the file that are read for this piece."""

    def read(self, start: int, bytes_before: int) -> Generator[Document, None, int]:
        """Yields the piece's documents from number `start` on; `bytes_before` are counted into `Document.bytes_read`.

        Returns: how many documents are still to be skipped, if the piece has fewer than `start`.
        Raises: DataError with file and line or row.
        """

    def divided(self, target_bytes: int) -> Iterable["Piece"]:
        """Returns pieces with the same documents in the same order, of `target_bytes` if the file allows it."""


@dataclass(frozen=True, kw_only=True)
class JoinedPieces:
    """Consecutive pieces: a part of a corpus."""

    pieces: tuple[Piece, ...]

    @property
    def total_bytes(self) -> int:
        return sum(piece.total_bytes for piece in self.pieces)

    def documents(self, start: int = 0) -> Iterator[Document]:
        bytes_before = 0
        for piece in self.pieces:
            start = yield from piece.read(start, bytes_before)
            bytes_before += piece.total_bytes


class FileCorpus(JoinedPieces):
    """The documents of files."""

    def parts(self, target_bytes: int) -> tuple[JoinedPieces, ...]:
        """Returns the parts. Raises: ValueError if `target_bytes` is not positive; DataError for an invalid file."""
        if target_bytes < 1:
            raise ValueError(f"parts of {target_bytes} bytes: expected at least 1")
        pieces = tuple(piece for whole in self.pieces for piece in whole.divided(target_bytes))
        offsets = np.append(0, np.cumsum([piece.total_bytes for piece in pieces], dtype=np.int64))
        return tuple(JoinedPieces(pieces=pieces[first:stop]) for first, stop in cut(offsets, target_bytes))
