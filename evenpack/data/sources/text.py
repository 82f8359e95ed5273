"""The source `text`: plain UTF-8 text. Line ends become '\\n'; a text of white space alone is not a document."""

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from evenpack.data.sources.config import TextSource
from evenpack.data.sources.corpus import Document
from evenpack.data.sources.file_kinds import kind_of_files
from evenpack.data.sources.input_files import SourceReader
from evenpack.data.sources.line_ranges import LineRange, documents_of
from evenpack.data.sources.rows import filled_lines, paragraphs


@dataclass(frozen=True, kw_only=True)
class TextPiece:
    """A file, or the parts of one between blank lines or line ends."""

    lines: LineRange
    separator: Literal["file", "blank_line", "line"]

    @property
    def name(self) -> str:
        return self.lines.name

    @property
    def total_bytes(self) -> int:
        return self.lines.total_bytes

    def read(self, start: int, bytes_before: int) -> Generator[Document, None, int]:
        with self.lines.open() as reader:
            return (yield from documents_of(reader, self._texts(reader), str, start=start, bytes_before=bytes_before))

    def divided(self, target_bytes: int) -> Iterator["TextPiece"]:
        if self.separator == "file":
            return iter((self,))
        ends_document: Callable[[bytes], bool] | None = None if self.separator == "line" else bytes.isspace
        return (replace(self, lines=lines) for lines in self.lines.divided(target_bytes, ends_document=ends_document))

    def _texts(self, reader: SourceReader) -> Iterator[str]:
        lines = (reader.decode(line).rstrip("\r\n") for line in reader.lines())
        if self.separator == "line":
            yield from filled_lines(lines)
        elif self.separator == "blank_line":
            yield from paragraphs(lines)
        else:
            yield from filled_lines(["\n".join(lines)])


def _piece(source: TextSource, path: Path) -> TextPiece:
    return TextPiece(lines=LineRange(path=path), separator=source.document_separator)


KIND = kind_of_files(_piece, suffixes=None)
