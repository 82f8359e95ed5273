"""The source `hdf5`: shards of finished, masked pairs. They hold no text; `evenpack.data.shards` reads them."""

from pathlib import Path
from typing import NoReturn

from evenpack.data.sources.config import Hdf5Source
from evenpack.data.sources.corpus import SourceKind
from evenpack.data.sources.input_files import InputFile
from evenpack.data.sources.source_files import find_files, refuse_shared_files
from evenpack.errors import ConfigError, DataError

_SUFFIXES = (".hdf5", ".hdf", ".h5")


def find_shards(path: Path) -> tuple[Path, ...]:
    """Returns the shards that a path leads to, without a run file. Raises: ConfigError if there are none."""
    try:
        return find_files("shards", path, suffixes=_SUFFIXES)
    except DataError as error:
        raise ConfigError(
            f"{path} is not a file, a folder with {', '.join(_SUFFIXES)} files, or a pattern that matches one"
        ) from error


def training_files(name: str, source: Hdf5Source) -> tuple[Path, ...]:
    """Returns the shards to train on. Raises: DataError if the path is missing or leads to no file."""
    return find_files(name, source.path, suffixes=_SUFFIXES)


def validation_files(name: str, source: Hdf5Source) -> tuple[Path, ...]:
    """Returns the shards of the fixed evaluation set, none if there is no such set.

    Raises: DataError if the path leads to no file, or to a training file.
    """
    if source.validation_path is None:
        return ()
    files = find_files(name, source.validation_path, suffixes=_SUFFIXES, key="validation_path")
    refuse_shared_files(name, training_files(name, source), files)
    return files


def bytes_to_read(name: str, source: Hdf5Source) -> int:
    """Returns the bytes read in preparation: without an evaluation set the shards are read once for each split."""
    training, validation = (
        sum(path.stat().st_size for path in files)
        for files in (training_files(name, source), validation_files(name, source))
    )
    return training + (validation or training)


def inputs(name: str, source: Hdf5Source) -> tuple[InputFile, ...]:
    """Returns the shards of both sets."""
    files = (*training_files(name, source), *validation_files(name, source))
    return tuple(InputFile.of(path) for path in files)


def _holds_no_text(name: str, _source: Hdf5Source) -> NoReturn:
    raise DataError(f"source '{name}' consists of HDF5 shards: it holds no text")


KIND = SourceKind[Hdf5Source](open_corpus=_holds_no_text, inputs=inputs)
