"""The source `hub`: a dataset of the Hugging Face hub, or a local folder of that form, through `datasets`."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from evenpack.data.sources.config import HubSource
from evenpack.data.sources.corpus import Document, SourceKind, WholeCorpus, make_document
from evenpack.data.sources.hub_rows import HubRows
from evenpack.data.sources.input_files import InputFile
from evenpack.data.sources.source_files import files_below
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
            if not isinstance(text, str):
                raise DataError(
                    f"{self._place(number)}: '{self._source.text_key}' must be a string, found {type(text).__name__}"
                )
            bytes_read = self.total_bytes * (number + 1) // self._rows.count
            yield make_document(text, bytes_read, partial(self._place, number))

    def parts(self, target_bytes: int) -> tuple[WholeCorpus, ...]:
        """Returns one part: only `datasets` knows the location of rows."""
        return (WholeCorpus(name=self._source.name, corpus=self),)

    def _place(self, number: int) -> str:
        return f"row {number} of {self._source.name}"


def inputs(_name: str, source: HubSource) -> tuple[InputFile, ...]:
    """Returns the files of a local folder, including links; a name on the hub is not queried again."""
    folder = Path(source.name).expanduser()
    return tuple(InputFile.of(file) for file in files_below(folder)) if folder.is_dir() else ()


KIND = SourceKind[HubSource](open_corpus=HubCorpus, inputs=inputs)
