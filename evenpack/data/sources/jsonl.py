"""`jsonl`: one JSON object a line, plain or compressed; lines of white space are passed over."""

from collections.abc import Iterator
from pathlib import Path

from evenpack.data.sources.config import JsonlSource
from evenpack.data.sources.corpus import Document, FileCorpus, SourceKind, file_inputs, find_files, make_document
from evenpack.data.sources.input_files import SourceReader
from evenpack.data.sources.json_lines import JSONL_SUFFIXES, filled_lines, value_of
from evenpack.errors import DataError


class JsonlCorpus(FileCorpus):
    """The strings under one key."""

    def __init__(self, files: tuple[Path, ...], text_key: str) -> None:
        super().__init__(files)
        self._text_key = text_key

    def documents(self, start: int = 0) -> Iterator[Document]:
        number = 0
        for reader, bytes_before in self._readers():
            for line in filled_lines(reader):
                number += 1
                if number > start:
                    yield make_document(self._text(reader, line), bytes_before + reader.bytes_read, reader.where)

    def _text(self, reader: SourceReader, line: bytes) -> str:
        found = reader.json_object(line)
        text = value_of(found, self._text_key, reader.where, remedy="Set the source's text_key")
        if not isinstance(text, str):
            raise DataError(f"{reader.where}: '{self._text_key}' must be a string, found {type(text).__name__}")
        return text


KIND = SourceKind[JsonlSource](
    open_corpus=lambda name, source: JsonlCorpus(
        find_files(name, source.path, suffixes=JSONL_SUFFIXES), source.text_key
    ),
    inputs=lambda name, source: file_inputs(name, source.path, suffixes=JSONL_SUFFIXES),
)
