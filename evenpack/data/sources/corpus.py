"""What every kind of source has in common: documents, one after another, whatever they are kept in.

`documents(start)` goes over the first `start` documents without parsing more than it must, so that an interrupted
`prepare` goes on where it was. Each mistake in a file is a DataError that names the file and the line or row.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import xxhash

from evenpack.data.sources.input_files import InputFile
from evenpack.errors import DataError

SectionT = TypeVar("SectionT")


class Document(NamedTuple):
    """One document and what is known of it without tokens."""

    text: str
    text_bytes: int
    """Of the text in UTF-8."""
    identity: int
    """xxh3_64 of the text in UTF-8: equal documents are known by it, and the validation split follows it."""
    bytes_read: int
    """Bytes of the source's files read so far, this document included; counts up to `Corpus.total_bytes`."""


@runtime_checkable
class DocumentStream(Protocol):
    """Documents in an order that never changes."""

    @property
    def total_bytes(self) -> int:
        """What `Document.bytes_read` comes to in the end."""

    def documents(self, start: int = 0) -> Iterator[Document]:
        """Documents from number `start` on, always in the same order. Raises: DataError with file and line."""


@runtime_checkable
class CorpusPart(DocumentStream, Protocol):
    """Some documents of a source in a row, which can be read without those before them. It can be pickled.

    `documents` and `Document.bytes_read` count from the part's own beginning.
    """

    @property
    def name(self) -> str:
        """The file, or the first and the last one, and the range of it; for messages."""


@runtime_checkable
class Corpus(DocumentStream, Protocol):
    """The documents of one source."""

    def parts(self, target_bytes: int) -> tuple[CorpusPart, ...]:
        """Parts whose documents, one part after the other, are `documents()`.

        A part has about `target_bytes` of the files, or less; more where a document or what can only be read as a whole
        (a compressed file, a row group) has. Their `total_bytes` add up to that of the corpus. The same files
        give the same parts.
        """


@dataclass(frozen=True, kw_only=True)
class WholeCorpus:
    """A corpus as the one part of itself, where it cannot be read in several."""

    name: str
    corpus: DocumentStream

    @property
    def total_bytes(self) -> int:
        return self.corpus.total_bytes

    def documents(self, start: int = 0) -> Iterator[Document]:
        return self.corpus.documents(start)


@dataclass(frozen=True, kw_only=True)
class SourceKind(Generic[SectionT]):
    """A kind of source: what is done with its section of the run file and the source's name."""

    open_corpus: Callable[[str, SectionT], Corpus]
    """Finds its files and reads none of them. Raises: DataError if the path is not given or leads to no file."""
    inputs: Callable[[str, SectionT], tuple[InputFile, ...]]
    """The files that it consists of, as they are now. Raises: DataError as `open_corpus`."""


def make_document(text: str, bytes_read: int, where: Callable[[], str]) -> Document:
    """The document of a text; `where` is asked for its place if it is no valid Unicode, which raises DataError."""
    encoded = encode_text(text, where)
    return Document(text, len(encoded), xxhash.xxh3_64_intdigest(encoded), bytes_read)


def encode_text(text: str, where: Callable[[], str]) -> bytes:
    """A text in UTF-8. Raises: DataError for half of a surrogate pair, which JSON can hold and UTF-8 cannot."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where()}: the text holds half of a surrogate pair at character {error.start} and is no valid Unicode"
        ) from error
