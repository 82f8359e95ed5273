"""The sources that hold no text: `megatron`, a pair of files of tokens, and `hdf5`, shards of finished, masked pairs.

The token file is used in its original location, and `evenpack.data.shards` reads the shards: both are prepared in their
own way.
"""

from pathlib import Path
from typing import NoReturn

from evenpack.data.sources.config import Hdf5Source, MegatronSource
from evenpack.data.sources.corpus import SourceKind
from evenpack.data.sources.files import InputFile, SourceFiles, find_files
from evenpack.errors import ConfigError, DataError

_SHARD_SUFFIXES = (".hdf5", ".hdf", ".h5")


def megatron_prefix(name: str, source: MegatronSource) -> Path:
    """Returns the common prefix of a token file's pair. Raises: DataError if it is missing or leads to no pair."""
    if source.path is None:
        raise DataError(f"source '{name}' has no path: give data.sources.{name}.path=PREFIX (of PREFIX.bin and .idx)")
    prefix = source.path.absolute()
    for path in _pair(prefix):
        if not path.is_file():
            raise DataError(
                f"source '{name}': {path} does not exist; give data.sources.{name}.path=PREFIX without '.bin' or '.idx'"
            )
    return prefix


def find_shards(path: Path) -> tuple[Path, ...]:
    """Returns the shards that a path leads to, without a run file. Raises: ConfigError if there are none."""
    try:
        return find_files("shards", path, suffixes=_SHARD_SUFFIXES)
    except DataError as error:
        raise ConfigError(
            f"{path} is not a file, a folder with {', '.join(_SHARD_SUFFIXES)} files, or a pattern that matches one"
        ) from error


def shards_of(name: str, source: Hdf5Source) -> SourceFiles:
    """Returns the shards to train on, and the shards of the fixed evaluation set, if there is one.

    Raises: DataError if a path is missing or leads to no file, or if a file belongs to both sets.
    """
    return SourceFiles.find(name, source, suffixes=_SHARD_SUFFIXES)


def _pair(prefix: Path) -> tuple[Path, Path]:
    return prefix.with_name(f"{prefix.name}.bin"), prefix.with_name(f"{prefix.name}.idx")


def _token_file(name: str, source: MegatronSource) -> tuple[InputFile, ...]:
    return tuple(InputFile.of(path) for path in _pair(megatron_prefix(name, source)))


def _shards(name: str, source: Hdf5Source) -> tuple[InputFile, ...]:
    files = shards_of(name, source)
    return tuple(InputFile.of(path) for path in (*files.training, *files.validation))


def _refuse(name: str, source: MegatronSource | Hdf5Source) -> NoReturn:
    raise DataError(f"source '{name}' is of kind {source.kind}: it holds no text")


MEGATRON = SourceKind[MegatronSource](open_corpus=_refuse, inputs=_token_file)
HDF5 = SourceKind[Hdf5Source](open_corpus=_refuse, inputs=_shards)
