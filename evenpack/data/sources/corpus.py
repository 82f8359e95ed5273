"""The interface that every kind of source has: documents, one after another, whatever their storage.

`documents(start)` skips the first `start` documents with as little parsing as possible, so that an interrupted
`prepare` can be resumed. Each error in a file is a DataError that names the file and the line or row.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import xxhash

from evenpack.data.sources.input_files import InputFile
from evenpack.errors import DataError

SectionT = TypeVar("SectionT")


class Document(NamedTuple):
    """One document and its properties without tokens."""

    text: str
    text_bytes: int
    """Bytes of the text in UTF-8."""
    identity: int
    """xxh3_64 of the text in UTF-8, which identifies equal documents and decides the validation split."""
    bytes_read: int
    """Bytes of the source's files read so far, including this document; ends at `Corpus.total_bytes`."""
    is_held_out: bool | None = None
    """Whether the document is one for validation, if the source's section names these; None if a hash decides."""

    @property
    def stored_identity(self) -> int:
        """The identity whose lowest bit is `is_held_out`, if that is known (`held_out` reads it there)."""
        return self.identity if self.is_held_out is None else self.identity & ~1 | self.is_held_out


@runtime_checkable
class DocumentStream(Protocol):
    """Documents in an order that never changes."""

    @property
    def total_bytes(self) -> int:
        """The final value of `Document.bytes_read`."""

    def documents(self, start: int = 0) -> Iterator[Document]:
        """Yields documents from number `start` on, always in the same order. Raises: DataError with file and line."""


@runtime_checkable
class CorpusPart(DocumentStream, Protocol):
    """Consecutive documents of a source, which can be read without the earlier ones. A part can be pickled.

    `documents` and `Document.bytes_read` count from the part's own beginning.
    """

    @property
    def name(self) -> str:
        """The file, or the first and the last one, and its range; for messages."""


@runtime_checkable
class Corpus(DocumentStream, Protocol):
    """The documents of one source."""

    def parts(self, target_bytes: int) -> tuple[CorpusPart, ...]:
        """Returns parts whose documents, one part after the other, are `documents()`.

        A part has about `target_bytes` of the files, or less; more if a document or an indivisible unit (a compressed
        file, a row group) has more. Their `total_bytes` add up to that of the corpus. The same files give the same
        parts.
        """


@dataclass(frozen=True, kw_only=True)
class WholeCorpus:
    """A corpus as its own single part, if it cannot be divided."""

    name: str
    corpus: DocumentStream

    @property
    def total_bytes(self) -> int:
        return self.corpus.total_bytes

    def documents(self, start: int = 0) -> Iterator[Document]:
        return self.corpus.documents(start)


@dataclass(frozen=True, kw_only=True)
class SourceKind(Generic[SectionT]):
    """A kind of source: functions of its section of the run file and the source's name."""

    open_corpus: Callable[[str, SectionT], Corpus]
    """Finds its files and reads none of them. Raises: DataError if the path is missing or leads to no file."""
    inputs: Callable[[str, SectionT], tuple[InputFile, ...]]
    """Returns its files as they are now. Raises: DataError as `open_corpus`."""


def make_document(text: str, bytes_read: int, where: Callable[[], str]) -> Document:
    """Makes the document of a text; `where` gives its position if it is not valid Unicode, which raises DataError."""
    encoded = encode_text(text, where)
    return Document(text, len(encoded), xxhash.xxh3_64_intdigest(encoded), bytes_read)


def encode_text(text: str, where: Callable[[], str]) -> bytes:
    """Returns a text in UTF-8. Raises: DataError for half of a surrogate pair, which JSON can hold and UTF-8 cannot."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where()}: the text holds half of a surrogate pair at character {error.start} and is not valid Unicode"
        ) from error
