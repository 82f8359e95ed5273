"""`hub`: a dataset of the Hugging Face hub, or a local folder of that shape, through `datasets`."""

from collections.abc import Iterator
from pathlib import Path

from evenpack.data.sources.config import HubSource
from evenpack.data.sources.corpus import Document, SourceKind, file_inputs, make_document
from evenpack.data.sources.hub_rows import HubRows
from evenpack.data.sources.input_files import InputFile
from evenpack.errors import DataError


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
            yield make_document(text, self.total_bytes * (number + 1) // self._rows.count, where)


def inputs(name: str, source: HubSource) -> tuple[InputFile, ...]:
    """The files of a local folder; a name of the hub is not asked again."""
    folder = Path(source.name).expanduser()
    return file_inputs(name, folder, suffixes=None) if folder.is_dir() else ()


KIND = SourceKind[HubSource](open_corpus=HubCorpus, inputs=inputs)
