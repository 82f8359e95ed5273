"""The source `parquet`: a text column of .parquet files, read row group by row group."""

from pathlib import Path
from typing import TYPE_CHECKING

from evenpack.data.sources.columns import ColumnPiece
from evenpack.data.sources.config import ParquetSource
from evenpack.data.sources.corpus import SourceKind
from evenpack.data.sources.pieces import FileCorpus
from evenpack.data.sources.source_files import file_inputs, find_files

if TYPE_CHECKING:
    from evenpack.data.sources.tables import BlockTable

_SUFFIXES = (".parquet",)


def _open_table(path: Path) -> "BlockTable":
    from evenpack.data.sources.tables.parquet import ParquetTable  # pyarrow takes a while to import

    return ParquetTable(path)


def _open_corpus(name: str, source: ParquetSource) -> FileCorpus:
    files = find_files(name, source.path, suffixes=_SUFFIXES)
    return FileCorpus(
        pieces=tuple(ColumnPiece(path=path, text_key=source.text_key, open_table=_open_table) for path in files)
    )


KIND = SourceKind[ParquetSource](
    open_corpus=_open_corpus,
    inputs=lambda name, source: file_inputs(name, source.path, suffixes=_SUFFIXES),
)
