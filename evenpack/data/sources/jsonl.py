"""The source `jsonl`: one JSON object per line, plain or compressed; lines of white space are skipped."""

from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from evenpack.data.sources.config import JsonlSource
from evenpack.data.sources.corpus import Document
from evenpack.data.sources.file_kinds import kind_of_files
from evenpack.data.sources.input_files import SourceReader
from evenpack.data.sources.json_lines import JSONL_SUFFIXES, filled_lines, value_of
from evenpack.data.sources.line_ranges import LineRange, documents_of
from evenpack.errors import DataError


@dataclass(frozen=True, kw_only=True)
class JsonlPiece:
    """The strings under one key."""

    lines: LineRange
    text_key: str

    @property
    def name(self) -> str:
        return self.lines.name

    @property
    def total_bytes(self) -> int:
        return self.lines.total_bytes

    def read(self, start: int, bytes_before: int) -> Generator[Document, None, int]:
        with self.lines.open() as reader:
            text_of = partial(self._text, reader)
            return (
                yield from documents_of(reader, filled_lines(reader), text_of, start=start, bytes_before=bytes_before)
            )

    def divided(self, target_bytes: int) -> Iterator["JsonlPiece"]:
        return (replace(self, lines=lines) for lines in self.lines.divided(target_bytes))

    def _text(self, reader: SourceReader, line: bytes) -> str:
        found = reader.json_object(line)
        if isinstance(text := found.get(self.text_key), str):
            return text
        other = value_of(found, self.text_key, reader.where, remedy="Set the source's text_key")
        raise DataError(f"{reader.where}: '{self.text_key}' must be a string, found {type(other).__name__}")


def _piece(source: JsonlSource, path: Path) -> JsonlPiece:
    lines = LineRange(path=path, longest_line_bytes=source.maximum_document_bytes)
    return JsonlPiece(lines=lines, text_key=source.text_key)


KIND = kind_of_files(_piece, suffixes=JSONL_SUFFIXES)
