"""The source `arrow`: a text column of Arrow files, or of folders that `datasets` wrote with `save_to_disk`."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from evenpack.data.sources.columns import ColumnPiece
from evenpack.data.sources.config import ArrowSource
from evenpack.data.sources.file_kinds import kind_of_files
from evenpack.data.sources.saved_sets import ARROW_SUFFIXES, saved_files
from evenpack.data.sources.source_files import FolderFiles

if TYPE_CHECKING:
    from evenpack.data.sources.tables import BlockTable


def _open_table(path: Path) -> "BlockTable":
    from evenpack.data.sources.tables.arrow import ArrowTable  # pyarrow takes a while to import

    return ArrowTable(path)


def _own_files(name: str, source: ArrowSource, key: str) -> FolderFiles:
    if key == "path":
        return partial(saved_files, split=source.split, key=f"data.sources.{name}.split")
    return partial(saved_files, split=None, key=None)


def _piece(source: ArrowSource, path: Path) -> ColumnPiece:
    return ColumnPiece(
        path=path,
        text_key=source.text_key,
        open_table=_open_table,
        longest_text_bytes=source.maximum_document_bytes,
    )


KIND = kind_of_files(_piece, suffixes=ARROW_SUFFIXES, own_files=_own_files)
