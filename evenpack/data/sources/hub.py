"""The source `hub`: a dataset of the Hugging Face hub, or a local folder of that form, through `datasets`."""

from collections.abc import Generator
from functools import partial
from pathlib import Path

from evenpack.data.sources.columns import refuse_long_text
from evenpack.data.sources.config import HubSource
from evenpack.data.sources.corpus import Document, SourceKind, make_document
from evenpack.data.sources.hub_rows import HubRows
from evenpack.data.sources.input_files import InputFile
from evenpack.data.sources.pieces import FileCorpus, LabelledPiece
from evenpack.data.sources.source_files import files_below
from evenpack.errors import DataError


class HubPiece:
    """A split of a dataset that `datasets` loads."""

    def __init__(self, name: str, source: HubSource) -> None:
        self._source = source
        self._rows = HubRows(name, source)

    @property
    def name(self) -> str:
        return f"{self._source.name}, split {self._source.split}"

    @property
    def total_bytes(self) -> int:
        return self._rows.total_bytes

    def read(self, start: int, bytes_before: int) -> Generator[Document, None, int]:
        count, total_bytes = self._rows.count, self.total_bytes
        for number, value in enumerate(self._rows.read(start), start=start):
            refuse_long_text(value, partial(self._place, number), most=self._source.maximum_document_bytes)
            text = value.as_py()
            if not isinstance(text, str):
                raise DataError(
                    f"{self._place(number)}: '{self._source.text_key}' must be a string, found {type(text).__name__}"
                )
            bytes_read = bytes_before + total_bytes * (number + 1) // count
            yield make_document(text, bytes_read, partial(self._place, number))
        return max(0, start - count)

    def divided(self, target_bytes: int) -> tuple["HubPiece", ...]:
        """Returns the piece itself: only `datasets` knows the location of rows."""
        return (self,)

    def _place(self, number: int) -> str:
        return f"row {number} of {self._source.name}"


def open_corpus(name: str, source: HubSource) -> FileCorpus:
    """Loads the splits, that for validation first. Raises: DataError if one cannot be loaded."""
    training = HubPiece(name, source)
    if source.validation_split is None:
        return FileCorpus(pieces=(training,))
    of_validation = source.model_copy(update={"split": source.validation_split, "validation_split": None})
    return FileCorpus(
        pieces=(
            LabelledPiece(piece=HubPiece(name, of_validation), is_held_out=True),
            LabelledPiece(piece=training, is_held_out=False),
        )
    )


def inputs(_name: str, source: HubSource) -> tuple[InputFile, ...]:
    """Returns the files of a local folder, including links; a name on the hub is not queried again."""
    folder = Path(source.name).expanduser()
    return tuple(InputFile.of(file) for file in files_below(folder)) if folder.is_dir() else ()


KIND = SourceKind[HubSource](open_corpus=open_corpus, inputs=inputs)
