"""The source `arrow`: a text column of Arrow files, or of folders that `datasets` wrote with `save_to_disk`."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from evenpack.data.sources.columns import ColumnPiece
from evenpack.data.sources.config import ArrowSource
from evenpack.data.sources.corpus import SourceKind
from evenpack.data.sources.input_files import InputFile
from evenpack.data.sources.pieces import FileCorpus
from evenpack.data.sources.saved_sets import ARROW_SUFFIXES, saved_files
from evenpack.data.sources.source_files import find_files

if TYPE_CHECKING:
    from evenpack.data.sources.tables import BlockTable


def _open_table(path: Path) -> "BlockTable":
    from evenpack.data.sources.tables.arrow import ArrowTable  # pyarrow takes a while to import

    return ArrowTable(path)


def _find(name: str, source: ArrowSource) -> tuple[Path, ...]:
    own_files = partial(saved_files, split=source.split, key=f"data.sources.{name}.split")
    return find_files(name, source.path, suffixes=ARROW_SUFFIXES, own_files=own_files)


def _open_corpus(name: str, source: ArrowSource) -> FileCorpus:
    return FileCorpus(
        pieces=tuple(
            ColumnPiece(path=path, text_key=source.text_key, open_table=_open_table) for path in _find(name, source)
        )
    )


KIND = SourceKind[ArrowSource](
    open_corpus=_open_corpus,
    inputs=lambda name, source: tuple(InputFile.of(path) for path in _find(name, source)),
)
