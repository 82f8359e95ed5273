"""Source documents, one after another, whatever they are kept in.

    builtin   -> BuiltinCorpus    the standard library's own text
    jsonl     -> JsonlCorpus      *.jsonl, *.jsonl.zst, *.jsonl.gz
    text      -> TextCorpus       plain text
    hub       -> HubCorpus        through `datasets` (hub_corpus.py)

`documents(start)` goes over the first `start` documents without parsing more than it must, so that an interrupted
`prepare` goes on where it was. Each mistake in a file is a DataError that names the file and the line.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import xxhash

from evenpack.data.config import BuiltinSource, HubSource, JsonlSource, MegatronSource, Source, TextSource
from evenpack.data.sources import builtin as builtin_corpus
from evenpack.data.sources.hub import HubRows
from evenpack.data.sources.input_files import InputFile, SourceReader
from evenpack.data.tokens.index import bin_path, index_path
from evenpack.errors import DataError

_JSONL_SUFFIXES = (".jsonl", ".jsonl.zst", ".jsonl.gz")
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


@runtime_checkable
class Corpus(Protocol):
    """The documents of one source."""

    @property
    def total_bytes(self) -> int:
        """What `Document.bytes_read` comes to in the end."""

    def documents(self, start: int = 0) -> Iterator[Document]:
        """Documents from number `start` on, always in the same order. Raises: DataError with file and line."""


def open_corpus(name: str, source: Source) -> Corpus:
    """The corpus of source `name`; finds its files and reads none of them. A dataset of the hub is loaded.

    Raises: DataError if the path is not given or leads to no file.
    """
    match source:
        case BuiltinSource():
            return BuiltinCorpus()
        case JsonlSource():
            return JsonlCorpus(find_files(name, source.path, suffixes=_JSONL_SUFFIXES), source.text_key)
        case TextSource():
            return TextCorpus(find_files(name, source.path, suffixes=None), source.document_separator)
        case HubSource():
            return HubCorpus(name, source)
        case MegatronSource():
            raise DataError(f"source '{name}' is a token file: it holds no text")


def source_inputs(name: str, source: Source) -> tuple[InputFile, ...]:
    """The files that a source consists of, as they are now; none for a name of the hub, which is not asked again.

    Raises: DataError if the path is not given or leads to no file.
    """
    match source:
        case BuiltinSource():
            # One entry for the whole library: its hundreds of files change together, with Python.
            library = builtin_corpus.standard_library()
            files = [InputFile.of(path) for path in builtin_corpus.source_files(library)]
            total, newest = sum(file.bytes for file in files), max(file.modified_ns for file in files)
            return (InputFile(path=str(library), bytes=total, modified_ns=newest),)
        case JsonlSource():
            paths = find_files(name, source.path, suffixes=_JSONL_SUFFIXES)
        case TextSource():
            paths = find_files(name, source.path, suffixes=None)
        case HubSource():
            folder = Path(source.name).expanduser()
            paths = find_files(name, folder, suffixes=None) if folder.is_dir() else ()
        case MegatronSource():
            prefix = megatron_prefix(name, source)
            paths = (bin_path(prefix), index_path(prefix))
    return tuple(InputFile.of(path) for path in paths)


def megatron_prefix(name: str, source: MegatronSource) -> Path:
    """The common prefix of a token file's pair. Raises: DataError if it is not given or leads to no pair."""
    if source.path is None:
        raise DataError(f"source '{name}' has no path: give data.sources.{name}.path=PREFIX (of PREFIX.bin and .idx)")
    prefix = source.path.absolute()
    for path in (bin_path(prefix), index_path(prefix)):
        if not path.is_file():
            raise DataError(
                f"source '{name}': {path} does not exist; give data.sources.{name}.path=PREFIX without '.bin' or '.idx'"
            )
    return prefix


def find_files(name: str, path: Path | None, *, suffixes: tuple[str, ...] | None) -> tuple[Path, ...]:
    """A file, the files of a folder and its folders (of the given suffixes, hidden ones left out), or of a pattern.

    Sorted by path. Raises: DataError if there are none.
    """
    override = f"data.sources.{name}.path=FILE"
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


class BuiltinCorpus:
    """Pydoc's topics and the standard library's docstrings, equal documents once."""

    def __init__(self) -> None:
        self._library = builtin_corpus.standard_library()
        self._files = builtin_corpus.source_files(self._library)

    @property
    def total_bytes(self) -> int:
        return sum(path.stat().st_size for path in self._files)

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
                    text = self._text(reader.json_object(line), reader.where)
                    yield _document(text, bytes_before + reader.bytes_read, reader.where)

    def _text(self, value: dict[str, Any], where: str) -> str:
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
    """A dataset that `datasets` loads."""

    def __init__(self, name: str, source: HubSource) -> None:
        self._source = source
        self._rows = HubRows(name, source)

    @property
    def total_bytes(self) -> int:
        return self._rows.total_bytes

    def documents(self, start: int = 0) -> Iterator[Document]:
        for number, text in enumerate(self._rows.read(start), start=start):
            where = f"row {number} of {self._source.name}"
            if not isinstance(text, str):
                raise DataError(f"{where}: '{self._source.text_key}' must be a string, found {type(text).__name__}")
            yield _document(text, self.total_bytes * (number + 1) // self._rows.count, where)


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
