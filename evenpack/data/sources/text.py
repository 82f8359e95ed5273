"""`text`: plain UTF-8 text. Line ends become '\\n'; what holds only white space is no document."""

from collections.abc import Iterator
from pathlib import Path

from evenpack.data.sources.config import TextSource
from evenpack.data.sources.corpus import Document, FileCorpus, SourceKind, file_inputs, find_files, make_document
from evenpack.data.sources.input_files import SourceReader
from evenpack.data.sources.rows import filled_lines, paragraphs


class TextCorpus(FileCorpus):
    """Files, or what blank lines or line ends separate."""

    def __init__(self, files: tuple[Path, ...], separator: str) -> None:
        super().__init__(files)
        self._separator = separator

    def documents(self, start: int = 0) -> Iterator[Document]:
        number = 0
        for reader, bytes_before in self._readers():
            for text in self._texts(reader):
                number += 1
                if number > start:
                    yield make_document(text, bytes_before + reader.bytes_read, reader.where)

    def _texts(self, reader: SourceReader) -> Iterator[str]:
        """The documents of one file."""
        lines = (reader.decode(line).rstrip("\r\n") for line in reader.lines())
        if self._separator == "line":
            yield from filled_lines(lines)
        elif self._separator == "blank_line":
            yield from paragraphs(lines)
        else:
            yield from filled_lines(["\n".join(lines)])


KIND = SourceKind[TextSource](
    open_corpus=lambda name, source: TextCorpus(
        find_files(name, source.path, suffixes=None), source.document_separator
    ),
    inputs=lambda name, source: file_inputs(name, source.path, suffixes=None),
)
