"""Kinds of sources that read files of text: those for validation first, if the section names them, then the others.

They come first so that `maximum_rows`, which counts only training rows, can end a pass.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from evenpack.data.sources.config import SourceOfFiles
from evenpack.data.sources.corpus import SourceKind
from evenpack.data.sources.input_files import InputFile
from evenpack.data.sources.pieces import FileCorpus, LabelledPiece, Piece
from evenpack.data.sources.source_files import FolderFiles, find_files, refuse_shared_files

SectionT = TypeVar("SectionT", bound=SourceOfFiles)


def kind_of_files(
    piece: Callable[[SectionT, Path], Piece],
    *,
    suffixes: tuple[str, ...] | None,
    own_files: Callable[[str, SectionT, str], FolderFiles] = lambda name, source, key: lambda folder: None,
) -> SourceKind[SectionT]:
    """Returns the kind of source whose documents in a file are those of its `piece`.

    Args:
        suffixes: those of its files in a folder; None: any.
        own_files: returns how folders that are datasets list their files, for a source's name, its section, and the key
            of the section whose paths are searched.
    """

    def files_of(name: str, source: SectionT) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
        training = find_files(name, source.path, suffixes=suffixes, own_files=own_files(name, source, "path"))
        if source.validation_path is None:
            return (), training
        key = "validation_path"
        validation = find_files(
            name, source.validation_path, suffixes=suffixes, key=key, own_files=own_files(name, source, key)
        )
        refuse_shared_files(name, training, validation)
        return validation, training

    def open_corpus(name: str, source: SectionT) -> FileCorpus:
        validation, training = files_of(name, source)
        if not validation:
            return FileCorpus(pieces=tuple(piece(source, path) for path in training))
        labels = [*((path, True) for path in validation), *((path, False) for path in training)]
        return FileCorpus(
            pieces=tuple(LabelledPiece(piece=piece(source, path), is_held_out=held_out) for path, held_out in labels)
        )

    def inputs(name: str, source: SectionT) -> tuple[InputFile, ...]:
        return tuple(InputFile.of(path) for files in files_of(name, source) for path in files)

    return SourceKind(open_corpus=open_corpus, inputs=inputs)
