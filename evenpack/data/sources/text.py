"""`text`: plain UTF-8 text. Line ends become '\\n'; what holds only white space is no document."""

from collections.abc import Iterator
from pathlib import Path

from evenpack.data.sources.config import TextSource
from evenpack.data.sources.corpus import Document, FileCorpus, SourceKind, file_inputs, find_files, make_document
from evenpack.data.sources.input_files import SourceReader


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


KIND = SourceKind[TextSource](
    open_corpus=lambda name, source: TextCorpus(
        find_files(name, source.path, suffixes=None), source.document_separator
    ),
    inputs=lambda name, source: file_inputs(name, source.path, suffixes=None),
)
