"""`parquet`: a column of text of .parquet files, read row group by row group."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from evenpack.data.sources.config import ParquetSource
from evenpack.data.sources.corpus import Document, FileCorpus, SourceKind, file_inputs, find_files, make_document
from evenpack.errors import DataError

if TYPE_CHECKING:
    from evenpack.data.sources.tables import Rows

_SUFFIXES = (".parquet",)


class ParquetCorpus(FileCorpus):
    """The strings of one column; row groups before the first document asked for are not read."""

    def __init__(self, files: tuple[Path, ...], text_key: str) -> None:
        super().__init__(files)
        self._text_key = text_key

    def documents(self, start: int = 0) -> Iterator[Document]:
        from evenpack.data.sources.tables.parquet import ParquetTable  # pyarrow takes a while to import

        bytes_before = 0
        for path in self._files:
            table = ParquetTable(path)
            for rows in table.rows(table.text_column(self._text_key), as_text=True, start=start):
                for index, text in enumerate(_texts(rows, self._text_key)):
                    yield make_document(text, bytes_before + rows.bytes_read, rows.place(index))
            start = max(0, start - table.count)
            bytes_before += path.stat().st_size


def _texts(rows: "Rows", column: str) -> Iterator[str]:
    """Raises: DataError with file and row for a null, or for bytes that are no UTF-8."""
    for index, value in enumerate(rows.columns[0]):
        try:
            text = value.as_py()
        except UnicodeDecodeError as error:
            raise DataError(f"{rows.place(index)}: '{column}' is no valid UTF-8: {error.reason}") from error
        if text is None:
            raise DataError(f"{rows.place(index)}: '{column}' is null, expected a string")
        yield text


KIND = SourceKind[ParquetSource](
    open_corpus=lambda name, source: ParquetCorpus(find_files(name, source.path, suffixes=_SUFFIXES), source.text_key),
    inputs=lambda name, source: file_inputs(name, source.path, suffixes=_SUFFIXES),
)
