"""Source documents, one after another, whatever they are kept in.

    builtin   -> BuiltinCorpus    the standard library's own text
    jsonl     -> JsonlCorpus      *.jsonl, *.jsonl.zst
    text      -> TextCorpus       plain text
    hub       -> HubCorpus        through `datasets` (hub_corpus.py)

`documents(start)` goes over the first `start` documents without parsing more than it must, so that an interrupted
`prepare` goes on where it was. Each mistake in a file is a DataError that names the file and the line.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

import xxhash

from evenpack.data import builtin_corpus
from evenpack.data.data_config import BuiltinSource, HubSource, JsonlSource, MegatronSource, Source, TextSource
from evenpack.data.hub_corpus import open_hub_dataset
from evenpack.data.input_files import InputFile, SourceReader
from evenpack.errors import DataError

_MOST_KEYS_SHOWN = 20


class Document(NamedTuple):
    """One document and what is known of it without tokens."""

    text: str
    text_bytes: int
    """Of the text in UTF-8."""
    identity: int
    """xxh3_64 of the text in UTF-8: equal documents are known by it, and the validation split follows it."""
    bytes_read: int
    """Bytes of the source's files read so far, this document included; counts up to `Corpus.total_bytes`."""


class Corpus(Protocol):
    """The documents of one source."""

    @property
    def total_bytes(self) -> int | None:
        """What `Document.bytes_read` comes to in the end; None if it cannot be known."""

    def inputs(self) -> tuple[InputFile, ...]:
        """The files that the documents come from, as they are now."""

    def documents(self, start: int = 0) -> Iterator[Document]:
        """Documents from number `start` on, always in the same order. Raises: DataError with file and line."""


def open_corpus(name: str, source: Source) -> Corpus:
    """The corpus of source `name`; finds its files and reads none of them.

    Raises: DataError if the path is not given or leads to no file.
    """
    match source:
        case BuiltinSource():
            return BuiltinCorpus()
        case JsonlSource():
            return JsonlCorpus(find_files(name, source.path, suffixes=(".jsonl", ".jsonl.zst")), source.text_key)
        case TextSource():
            return TextCorpus(find_files(name, source.path, suffixes=None), source.document_separator)
        case HubSource():
            return HubCorpus(name, source)
        case MegatronSource():
            raise DataError(f"source '{name}' is a token file: it holds no text")


def find_files(name: str, path: Path | None, *, suffixes: tuple[str, ...] | None) -> tuple[Path, ...]:
    """A file, the files of a folder and its folders (of the given suffixes, hidden ones left out), or of a pattern.

    Sorted by path. Raises: DataError if there are none.
    """
    override = f"data.sources.{name}.path=FILE"
    if path is None:
        raise DataError(f"source '{name}' has no path: give {override} (a file, a folder or a pattern)")
    path = path.expanduser()
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
        files = [found for found in matches if found.is_file()]
        if not files:
            raise DataError(f"source '{name}': {path} does not exist, and no file matches it; give {override}")
    return tuple(sorted(files))


class BuiltinCorpus:
    """Pydoc's topics and the standard library's docstrings, equal documents once."""

    def __init__(self) -> None:
        self._library = builtin_corpus.standard_library()
        self._files = builtin_corpus.source_files(self._library)

    @property
    def total_bytes(self) -> int:
        return sum(path.stat().st_size for path in self._files)

    def inputs(self) -> tuple[InputFile, ...]:
        """One entry for the whole library: its hundreds of files change together, with Python."""
        files = [InputFile.of(path) for path in self._files]
        newest = max(file.modified_ns for file in files)
        return (InputFile(path=str(self._library), bytes=self.total_bytes, modified_ns=newest),)

    def documents(self, start: int = 0) -> Iterator[Document]:
        seen: set[int] = set()
        bytes_read = 0
        for path in self._files:
            bytes_read += path.stat().st_size
            for text in builtin_corpus.file_documents(path, self._library):
                document = _document(text, bytes_read, where=str(path))
                if document.identity not in seen:
                    seen.add(document.identity)
                    if len(seen) > start:
                        yield document


class _FileCorpus:
    """What corpora of files share: the bytes of the files before the one being read."""

    def __init__(self, files: tuple[Path, ...]) -> None:
        self._files = files

    @property
    def total_bytes(self) -> int:
        return sum(path.stat().st_size for path in self._files)

    def inputs(self) -> tuple[InputFile, ...]:
        return tuple(InputFile.of(path) for path in self._files)

    def _readers(self) -> Iterator[tuple[SourceReader, int]]:
        """Each file, open, and the bytes of all files before it."""
        bytes_before = 0
        for path in self._files:
            with SourceReader(path) as reader:
                yield reader, bytes_before
            bytes_before += path.stat().st_size


class JsonlCorpus(_FileCorpus):
    """One JSON object a line; lines of white space are passed over."""

    def __init__(self, files: tuple[Path, ...], text_key: str) -> None:
        super().__init__(files)
        self._text_key = text_key

    def documents(self, start: int = 0) -> Iterator[Document]:
        number = 0
        for reader, bytes_before in self._readers():
            for line in reader.lines():
                if line.isspace():
                    continue
                number += 1
                if number > start:
                    text = self._text(reader.decode(line), reader.where)
                    yield _document(text, bytes_before + reader.bytes_read, reader.where)

    def _text(self, line: str, where: str) -> str:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: not a readable JSON line: {error}") from error
        if not isinstance(value, dict):
            raise DataError(f"{where}: expected a JSON object, found {type(value).__name__}")
        if self._text_key not in value:
            keys = ", ".join(repr(key) for key in list(value)[:_MOST_KEYS_SHOWN])
            raise DataError(
                f"{where}: no key '{self._text_key}'; the keys there are: {keys or 'none'}. Set the source's text_key"
            )
        text = value[self._text_key]
        if not isinstance(text, str):
            raise DataError(f"{where}: '{self._text_key}' must be a string, found {type(text).__name__}")
        return text


class TextCorpus(_FileCorpus):
    """Plain text. Line ends become '\\n'; what holds only white space is no document."""

    def __init__(self, files: tuple[Path, ...], separator: str) -> None:
        super().__init__(files)
        self._separator = separator

    def documents(self, start: int = 0) -> Iterator[Document]:
        number = 0
        for reader, bytes_before in self._readers():
            for text in self._texts(reader):
                number += 1
                if number > start:
                    yield _document(text, bytes_before + reader.bytes_read, reader.where)

    def _texts(self, reader: SourceReader) -> Iterator[str]:
        """The documents of one file."""
        lines = (reader.decode(line).rstrip("\r\n") for line in reader.lines())
        if self._separator == "line":
            yield from (line for line in lines if line.strip())
            return
        gathered: list[str] = []
        for line in lines:
            if self._separator == "blank_line" and not line.strip():
                if gathered:
                    yield "\n".join(gathered)
                gathered = []
            else:
                gathered.append(line)
        if any(line.strip() for line in gathered):
            yield "\n".join(gathered)


class HubCorpus:
    """A dataset that `datasets` loads; it is opened when the first document is asked for."""

    total_bytes = None

    def __init__(self, name: str, source: HubSource) -> None:
        self._name = name
        self._source = source

    def inputs(self) -> tuple[InputFile, ...]:
        """The files of a local folder. Of a name of the hub nothing is recorded: it is not asked again."""
        folder = Path(self._source.name).expanduser()
        if not folder.is_dir():
            return ()
        files = find_files(self._name, folder, suffixes=None)
        return tuple(InputFile.of(path) for path in files)

    def documents(self, start: int = 0) -> Iterator[Document]:
        bytes_read = 0
        for number, text in enumerate(open_hub_dataset(self._name, self._source, start=start), start=start):
            where = f"row {number} of {self._source.name}"
            if not isinstance(text, str):
                raise DataError(f"{where}: '{self._source.text_key}' must be a string, found {type(text).__name__}")
            document = _document(text, bytes_read, where)
            bytes_read += document.text_bytes
            yield document


def _document(text: str, bytes_read: int, where: str) -> Document:
    try:
        encoded = text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: the text holds half of a surrogate pair at character {error.start} and is no valid Unicode"
        ) from error
    return Document(text, len(encoded), xxhash.xxh3_64_intdigest(encoded), bytes_read)


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
