"""The source `text`: plain UTF-8 text. Line ends become '\\n'; a text of white space alone is not a document."""

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from evenpack.data.sources.config import TextSource
from evenpack.data.sources.corpus import Document
from evenpack.data.sources.file_kinds import kind_of_files
from evenpack.data.sources.input_files import SourceReader, too_long_error
from evenpack.data.sources.line_ranges import LineRange, documents_of
from evenpack.data.sources.rows import RowKind, filled_lines, paragraphs


@dataclass(frozen=True, kw_only=True)
class TextPiece:
    """A file, or the parts of one between blank lines or line ends."""

    lines: LineRange
    separator: Literal["file", "blank_line", "line"]
    rows: RowKind | None
    """What the documents are cut into later, of which each is read by itself: then a file of any size is."""

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
        if self.separator == "line" or self.rows == "lines":
            yield from filled_lines(self._lines(reader, lambda _: True))
        elif self.separator == "blank_line" or self.rows == "paragraphs":
            yield from paragraphs(self._lines(reader, lambda line: not line.strip()))
        else:
            yield from filled_lines(["\n".join(self._lines(reader, lambda _: False))])

    def _lines(self, reader: SourceReader, ends_document: Callable[[str], bool]) -> Iterator[str]:
        """Yields lines without their ends. Raises: DataError once those of a document are too long together."""
        document_bytes = 0
        for line in reader.lines():
            text = reader.decode(line).rstrip("\r\n")
            document_bytes = 0 if ends_document(text) else document_bytes + len(line)
            if document_bytes > self.lines.longest_line_bytes:
                raise too_long_error(reader.where, "document", most=self.lines.longest_line_bytes)
            yield text


def _piece(source: TextSource, path: Path) -> TextPiece:
    lines = LineRange(path=path, longest_line_bytes=source.maximum_document_bytes)
    return TextPiece(lines=lines, separator=source.document_separator, rows=source.rows)


KIND = kind_of_files(_piece, suffixes=None)
