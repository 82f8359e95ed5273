"""The source `parquet`: a text column of .parquet files, read row group by row group."""

from pathlib import Path
from typing import TYPE_CHECKING

from evenpack.data.sources.columns import ColumnPiece
from evenpack.data.sources.config import ParquetSource
from evenpack.data.sources.file_kinds import kind_of_files

if TYPE_CHECKING:
    from evenpack.data.sources.tables import BlockTable

_SUFFIXES = (".parquet",)


def _open_table(path: Path) -> "BlockTable":
    from evenpack.data.sources.tables.parquet import ParquetTable  # pyarrow takes a while to import

    return ParquetTable(path)


def _piece(source: ParquetSource, path: Path) -> ColumnPiece:
    return ColumnPiece(
        path=path,
        text_key=source.text_key,
        open_table=_open_table,
        longest_text_bytes=source.maximum_document_bytes,
    )


KIND = kind_of_files(_piece, suffixes=_SUFFIXES)
