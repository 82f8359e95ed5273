"""Folders that `datasets` wrote with `save_to_disk`: their files, found without that library.

FOLDER/state.json, dataset_info.json, data-00000-of-00002.arrow ...      a Dataset; state.json lists its files
FOLDER/dataset_dict.json, train/, test/ ...                              a DatasetDict; each folder is a Dataset
"""

from pathlib import Path
from typing import Any

from evenpack.errors import DataError
from evenpack.files import read_json

ARROW_SUFFIXES = (".arrow", ".arrows", ".feather")
"""Suffixes of files in Arrow's own format."""

_STATE = "state.json"
_SPLITS = "dataset_dict.json"


def saved_splits(folder: Path) -> tuple[str, ...] | None:
    """Returns the splits of a folder that holds a DatasetDict, none if it holds a Dataset; None for any other folder.

    Raises: DataError if the list of splits cannot be read.
    """
    if (folder / _SPLITS).is_file():
        splits = _read(folder / _SPLITS).get("splits")
        if not isinstance(splits, list) or not splits:
            raise _damaged(folder / _SPLITS, "no list of 'splits'")
        return tuple(str(split) for split in splits)
    return () if (folder / _STATE).is_file() and (folder / "dataset_info.json").is_file() else None


def saved_files(folder: Path, *, split: str | None, key: str | None) -> tuple[Path, ...] | None:
    """Returns the files of a saved dataset in its own order, or None if the folder is none.

    `key` is the split's key in the run file; None: there is none, and a split is named by its folder.

    Raises: DataError for a DatasetDict without a known split, for a Dataset with one, and for files that are missing.
    """
    splits = saved_splits(folder)
    if splits is None:
        return None
    if not splits:
        if split is not None:
            raise DataError(f"{folder} holds one dataset and no splits: leave {key}={split} out")
        return _listed_files(folder)
    if split not in splits:
        found = "no split is named" if split is None else f"'{split}' is none of them"
        remedy = f"give {folder / splits[0]} or another one's folder" if key is None else f"choose one with {key}=SPLIT"
        raise DataError(f"{folder} holds the splits {', '.join(splits)}, and {found}: {remedy}")
    return _listed_files(folder / split)


def _listed_files(folder: Path) -> tuple[Path, ...]:
    state = _read(folder / _STATE)
    if any(state[key] for key in state if key.startswith("_indices")):
        raise DataError(
            f"{folder / _STATE} selects rows by a table of indices, as old versions of datasets wrote it: load and "
            "save the dataset again"
        )
    listed = state.get("_data_files")
    if not isinstance(listed, list) or not all(isinstance(file, dict) and "filename" in file for file in listed):
        raise _damaged(folder / _STATE, "no list of file names under '_data_files'")
    files = tuple(folder / str(file["filename"]) for file in listed)
    for file in files:
        if not file.is_file():
            raise DataError(f"{folder / _STATE} lists {file.name}, which is missing: copy the whole folder again")
    return files


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        raise _damaged(path, str(error)) from error


def _damaged(path: Path, finding: str) -> DataError:
    return DataError(f"{path} is not in the form of save_to_disk: {finding}; copy the whole folder again")
