"""The sources that are files of text: `jsonl`, `text`, `parquet` and `arrow`."""

import contextlib
import json
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from evenpack.data.ranges import cut
from evenpack.data.sources.config import JsonlSource, ParquetSource, SourceOfFiles, TextSource
from evenpack.data.sources.corpus import Document, FileCorpus, Piece, SourceKind, make_document
from evenpack.data.sources.files import KEYS_WITHIN, SPLIT_KEYS, InputFile, SourceFiles, SplitsOfRows
from evenpack.data.sources.lines import JSONL_SUFFIXES, SourceReader, is_compressed, line_bounds, too_long_error
from evenpack.data.sources.rows import filled_lines, paragraphs
from evenpack.errors import DataError

if TYPE_CHECKING:
    from evenpack.data.sources.tables import ParquetTable, Rows


_MOST_KEYS_SHOWN = 20
SectionT = TypeVar("SectionT", bound=SourceOfFiles)


def kind_of_files(
    piece: Callable[[SectionT, Path, bool | None, Path], Piece],
    *,
    suffixes: tuple[str, ...] | None,
    recognised_endings: tuple[str, ...] = (),
) -> SourceKind[SectionT]:
    """Returns the kind of source whose documents in a file are the documents of its `piece`.

    Files for validation come first, so that `maximum_rows`, which counts only training rows, can end a pass.

    Args:
        piece: returns the piece that is a whole file; its documents are for validation or for training, None: a hash
            decides. It is told the first file of these, whose first row says a split for all.
        suffixes: endings of its files in a folder; None: any.
        recognised_endings: as in `SourceKind`, where any suffix is read; else they are `suffixes`.
    """

    def open_corpus(name: str, source: SectionT) -> FileCorpus:
        files = SourceFiles.find(name, source, suffixes=suffixes)
        named = source.has_validation_documents
        validation = [piece(source, path, True, files.validation[0]) for path in files.validation]
        training = [piece(source, path, False if named else None, files.training[0]) for path in files.training]
        return FileCorpus(pieces=(*validation, *training))

    def inputs(name: str, source: SectionT) -> tuple[InputFile, ...]:
        files = SourceFiles.find(name, source, suffixes=suffixes)
        return tuple(InputFile.of(path) for path in (*files.validation, *files.training))

    return SourceKind(open_corpus=open_corpus, inputs=inputs, recognised_endings=suffixes or recognised_endings)


EntryT = TypeVar("EntryT")


@dataclass(frozen=True)
class _LinesPiece(Generic[SectionT, EntryT]):
    """Consecutive lines of one file, by default the whole file."""

    source: SectionT
    path: Path
    is_held_out: bool | None
    first: Path
    """The first file of the source, whose rows are of the same split."""
    begin: int = 0
    """The first byte, at the start of a line."""
    stop: int | None = None
    """The byte after the last line; None at the end of the file."""

    @property
    def total_bytes(self) -> int:
        return (self.path.stat().st_size if self.stop is None else self.stop) - self.begin

    def read(self, start: int, bytes_before: int) -> Generator[Document, None, int]:
        longest = self.source.maximum_document_bytes
        splits = SplitsOfRows()
        self._see_first(splits)
        with SourceReader(self.path, begin=self.begin, stop=self.stop, longest_line_bytes=longest) as reader:
            for entry in self._entries(reader):
                if start:
                    start -= 1
                else:
                    text, bytes_read = self._text(entry, reader, splits), bytes_before + reader.bytes_read
                    yield make_document(text, bytes_read, lambda: reader.where, is_held_out=self.is_held_out)
        return start

    def divided(self, target_bytes: int) -> tuple["_LinesPiece[SectionT, EntryT]", ...]:
        """Divides a whole file into ranges of about equal size, at most `target_bytes` and a document, by seeking.

        A compressed file stays whole.
        """
        if not self._is_divisible or is_compressed(self.path) or self.total_bytes <= target_bytes:
            return (self,)
        bounds = line_bounds(self.path, target_bytes=target_bytes, ends_document=self._ends_document)
        return tuple(replace(self, begin=begin, stop=stop) for begin, stop in pairwise(bounds))

    @abstractmethod
    def _entries(self, reader: SourceReader) -> Iterator[EntryT]:
        """Yields what each document is made of, with as little parsing as possible."""

    @abstractmethod
    def _text(self, entry: EntryT, reader: SourceReader, splits: SplitsOfRows) -> str:
        """Returns the text of the document that is made of the last entry; `splits` sees what split it says."""

    def _see_first(self, splits: SplitsOfRows) -> None:
        """Shows `splits` the first row of the source, since others may have read the rows between."""

    @property
    def _is_divisible(self) -> bool:
        return True

    @property
    def _ends_document(self) -> Callable[[bytes], bool] | None:
        """Tells whether a line ends a document; None: every line does."""
        return None


class JsonlPiece(_LinesPiece[JsonlSource, bytes]):
    """The strings under one key of JSON objects, one per line; lines of white space are skipped."""

    def _entries(self, reader: SourceReader) -> Iterator[bytes]:
        return reader.filled_lines()

    def _see_first(self, splits: SplitsOfRows) -> None:
        with SourceReader(self.first, longest_line_bytes=self.source.maximum_document_bytes) as reader:
            for line in islice(reader.filled_lines(), 1):
                with contextlib.suppress(DataError):  # which its own piece raises
                    self._see_split(reader.json_object(line), reader, splits)

    def _see_split(self, found: dict[str, Any], reader: SourceReader, splits: SplitsOfRows) -> None:
        for key in SPLIT_KEYS:
            if key in found and key != self.source.text_key:
                splits.see(key, found[key], lambda: reader.where)
        for outer in KEYS_WITHIN:
            if isinstance(inner := found.get(outer), dict):
                for key in SPLIT_KEYS:
                    if key in inner:
                        splits.see(f"{outer}.{key}", inner[key], lambda: reader.where)

    def _text(self, entry: bytes, reader: SourceReader, splits: SplitsOfRows) -> str:
        found, key = reader.json_object(entry), self.source.text_key
        self._see_split(found, reader, splits)
        if entry.count(f'"{key}"'.encode()) > 1 and _keys(entry).count(key) > 1:
            raise DataError(f"{reader.where}: the key '{key}' occurs twice: remove the one that is not the document")
        if isinstance(text := found.get(key), str):
            return text
        if key not in found:
            keys = ", ".join(map(repr, islice(found, _MOST_KEYS_SHOWN)))
            raise DataError(
                f"{reader.where}: no key '{key}'; existing keys: {keys or 'none'}. Set the source's text_key"
            )
        raise DataError(f"{reader.where}: '{key}' must be a string, found {type(found[key]).__name__}")


def _keys(line: bytes) -> list[str]:
    """Returns the keys of a JSON object, each as often as it occurs."""
    objects: list[list[str]] = []
    json.loads(line, object_pairs_hook=lambda pairs: objects.append([key for key, _ in pairs]))
    return objects[-1]  # that around the others ends last


class TextPiece(_LinesPiece[TextSource, str]):
    """A file of text, or the parts of one between blank lines or line ends.

    Line ends become '\\n'; a text of white space alone is not a document. Rows into which documents are cut later are
    read by themselves, so a file of them may be of any size.
    """

    @property
    def _is_divisible(self) -> bool:
        return self.source.document_separator != "file"

    @property
    def _ends_document(self) -> Callable[[bytes], bool] | None:
        return None if self.source.document_separator == "line" else bytes.isspace

    def _entries(self, reader: SourceReader) -> Iterator[str]:
        separator, rows = self.source.document_separator, self.source.rows
        if separator == "line" or rows == "lines":
            yield from filled_lines(self._lines(reader, lambda _: True))
        elif separator == "blank_line" or rows == "paragraphs":
            yield from paragraphs(self._lines(reader, lambda line: not line.strip()))
        else:
            yield from filled_lines(["\n".join(self._lines(reader, lambda _: False))])

    def _text(self, entry: str, reader: SourceReader, splits: SplitsOfRows) -> str:
        return entry

    def _lines(self, reader: SourceReader, ends_document: Callable[[str], bool]) -> Iterator[str]:
        """Yields lines without their ends. Raises: DataError once the lines of a document are too long together."""
        document_bytes, most = 0, self.source.maximum_document_bytes
        for line in reader.lines():
            text = reader.decode(line).rstrip("\r\n")
            document_bytes = 0 if ends_document(text) else document_bytes + len(line)
            if document_bytes > most:
                raise too_long_error(reader.where, "document", most=most)
            yield text


@dataclass(frozen=True)
class ColumnPiece:
    """The strings of one column; row groups before the first requested document are not read."""

    source: ParquetSource
    path: Path
    is_held_out: bool | None
    first: Path
    """The first file of the source, whose rows are of the same split."""
    begin: int = 0
    """The first row, which begins a row group."""
    stop: int | None = None
    """The row after the last one; None at the end of the file."""
    share_bytes: int | None = None
    """Bytes of the file, in proportion to the content of its row groups; None for the whole file."""

    @property
    def total_bytes(self) -> int:
        return self.path.stat().st_size if self.share_bytes is None else self.share_bytes

    def read(self, start: int, bytes_before: int) -> Generator[Document, None, int]:
        table = _open_table(self.path)
        column = table.text_column(self.source.text_key)
        stop = table.row_count if self.stop is None else self.stop
        count, total_bytes = stop - self.begin, self.total_bytes
        if start >= count:
            return start - count
        done = start
        said = table.texts_among(key for key in SPLIT_KEYS if key not in column)
        found = table.rows((*column, *said), start=self.begin + start, stop=stop)
        splits = SplitsOfRows()
        if said:  # others may have read the rows between
            first = _open_table(self.first)
            known = first.texts_among(said)
            for rows in islice(first.rows(known), 1) if known else ():
                _see_splits(splits, known, [column[:1] for column in rows.columns], rows)
        for rows in found:
            _see_splits(splits, said, rows.columns[1:], rows)
            for index, value in enumerate(rows.columns[0]):
                where = partial(rows.place, index)
                text = text_of(value, self.source.text_key, where, most=self.source.maximum_document_bytes)
                done += 1
                bytes_read = bytes_before + total_bytes * done // count
                yield make_document(text, bytes_read, where, is_held_out=self.is_held_out)
        return 0

    def divided(self, target_bytes: int) -> tuple["ColumnPiece", ...]:
        """Yields neighbouring row groups together, up to `target_bytes`."""
        table = _open_table(self.path)
        groups = [*table.row_groups(table.text_column(self.source.text_key))]
        rows = [0, *accumulate(count for count, _ in groups)]
        weights = [0, *accumulate(stored for _, stored in groups)]
        edges = [self.total_bytes * weight // max(1, weights[-1]) for weight in weights]
        cuts = tuple(cut(np.array(edges, dtype=np.int64), target_bytes))
        if len(cuts) < 2:
            return (self,)
        return tuple(
            replace(self, begin=rows[first], stop=rows[last], share_bytes=edges[last] - edges[first])
            for first, last in cuts
        )


def _open_table(path: Path) -> "ParquetTable":
    from evenpack.data.sources.tables import ParquetTable  # pyarrow takes a while to import

    return ParquetTable(path)


def _see_splits(splits: SplitsOfRows, keys: Sequence[str], columns: Sequence[Any], rows: "Rows") -> None:
    """Shows the values of the columns that say a split."""
    for key, values in zip(keys, columns, strict=True):
        for index, value in enumerate(values.to_pylist()):
            splits.see(key, value, partial(rows.place, index))


def text_of(value: Any, key: str, where: Callable[[], str], *, most: int) -> str:
    """Returns the text of a scalar of `pyarrow`, which is not copied before its length is known.

    Raises: DataError for a text of more than `most` bytes, for bytes that are not UTF-8, and for what is no text.
    """
    value = getattr(value, "value", value)  # the value of a dictionary's scalar
    buffer = value.as_buffer() if hasattr(value, "as_buffer") else None
    if buffer is not None and buffer.size > most:
        raise too_long_error(where(), "text", most=most)
    try:
        text = value if value is None else value.as_py()
    except UnicodeDecodeError as error:
        raise DataError(f"{where()}: '{key}' is not valid UTF-8: {error.reason}") from error
    if not isinstance(text, str):
        found = "null" if text is None else type(text).__name__
        raise DataError(f"{where()}: '{key}' must be a string, found {found}")
    return text


JSONL: SourceKind[JsonlSource] = kind_of_files(JsonlPiece, suffixes=JSONL_SUFFIXES)


TEXT: SourceKind[TextSource] = kind_of_files(TextPiece, suffixes=None, recognised_endings=(".txt", ".text", ".md"))


PARQUET: SourceKind[ParquetSource] = kind_of_files(ColumnPiece, suffixes=(".parquet",))
