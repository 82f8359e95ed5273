"""What every kind of source has in common: documents, one after another, whatever they are kept in.

`documents(start)` goes over the first `start` documents without parsing more than it must, so that an interrupted
`prepare` goes on where it was. Each mistake in a file is a DataError that names the file and the line or row.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import xxhash

from evenpack.data.sources.input_files import InputFile, SourceReader
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
class Corpus(Protocol):
    """The documents of one source."""

    @property
    def total_bytes(self) -> int:
        """What `Document.bytes_read` comes to in the end."""

    def documents(self, start: int = 0) -> Iterator[Document]:
        """Documents from number `start` on, always in the same order. Raises: DataError with file and line."""


@dataclass(frozen=True, kw_only=True)
class SourceKind(Generic[SectionT]):
    """A kind of source: what is done with its section of the run file and the source's name."""

    open_corpus: Callable[[str, SectionT], Corpus]
    """Finds its files and reads none of them. Raises: DataError if the path is not given or leads to no file."""
    inputs: Callable[[str, SectionT], tuple[InputFile, ...]]
    """The files that it consists of, as they are now. Raises: DataError as `open_corpus`."""


class FileCorpus:
    """What corpora of files share: the bytes of the files before the one being read."""

    def __init__(self, files: tuple[Path, ...]) -> None:
        self._files = files

    @property
    def total_bytes(self) -> int:
        return sum(path.stat().st_size for path in self._files)

    def _readers(self) -> Iterator[tuple[SourceReader, int]]:
        """Each file, open, and the bytes of all files before it."""
        bytes_before = 0
        for path in self._files:
            with SourceReader(path) as reader:
                yield reader, bytes_before
            bytes_before += path.stat().st_size


def make_document(text: str, bytes_read: int, where: str) -> Document:
    """The document of a text that was read at `where`. Raises: DataError if it is no valid Unicode."""
    encoded = encode_text(text, where)
    return Document(text, len(encoded), xxhash.xxh3_64_intdigest(encoded), bytes_read)


def encode_text(text: str, where: str) -> bytes:
    """A text in UTF-8. Raises: DataError for half of a surrogate pair, which JSON can hold and UTF-8 cannot."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: the text holds half of a surrogate pair at character {error.start} and is no valid Unicode"
        ) from error


def find_files(
    name: str, path: Path | None, *, suffixes: tuple[str, ...] | None, key: str = "path"
) -> tuple[Path, ...]:
    """A file, the files of a folder and its folders (of the given suffixes, hidden ones left out), or of a pattern.

    Sorted by path. `key` is what the path is called in the source's section. Raises: DataError if there are none.
    """
    override = f"data.sources.{name}.{key}=FILE"
    if path is None:
        raise DataError(f"source '{name}' has no path: give {override} (a file, a folder or a pattern)")
    if path.is_file():
        return (path,)
    if path.is_dir():
        files = [found for found in path.rglob("*") if found.is_file() and not _is_hidden(found.relative_to(path))]
        files = [found for found in files if suffixes is None or found.name.endswith(suffixes)]
        expected = "files" if suffixes is None else " or ".join(f"*{suffix}" for suffix in suffixes)
        if not files:
            raise DataError(f"source '{name}': folder {path} holds no {expected}; give {override}")
    else:
        matches = Path(path.anchor or ".").glob(str(path.relative_to(path.anchor)))
        files = [found for found in matches if found.is_file() and not _is_hidden(Path(found.name))]
        if not files:
            raise DataError(f"source '{name}': {path} does not exist, and no file matches it; give {override}")
    return tuple(sorted(files))


def file_inputs(name: str, path: Path | None, *, suffixes: tuple[str, ...] | None) -> tuple[InputFile, ...]:
    """What `find_files` finds, as it is now."""
    return tuple(InputFile.of(found) for found in find_files(name, path, suffixes=suffixes))


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
