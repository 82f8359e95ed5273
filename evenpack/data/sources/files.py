"""Finds the files of a source's `path`, in an order that is the same on every machine, and their state."""

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

from evenpack.config import Section
from evenpack.data.sources.config import Hdf5Source, SourceOfFiles
from evenpack.errors import DataError

log = logging.getLogger(__name__)

_GLOB_CHARACTERS = frozenset("*?[")
_SPLITS = {
    "validation": re.compile(r"(vals?|valid|validate|validation|dev|devel|development)(set|data)?"),
    "test": re.compile(r"(tests?|testing|evals?|evaluation|unseen)(set|data)?|(news)?test[ab]?|tst|(held|hold)(out)?"),
    "train": re.compile(r"train(ing)?(set|data)?|trn"),
}
"""The words by which names of files, folders and sources say a split; of two, the first here counts."""
_MOST_WORDS = 5
"""Words of a name in which a split may stand anywhere; in a longer one, or a title, at its ends alone."""
_OF_TITLES = frozenset(("a", "an", "and", "for", "how", "my", "on", "the", "to", "what", "with", "your"))
SPLIT_KEYS = ("split", "Split", "data_split", "dataset_split", "partition", "subset", "set")
"""Keys of rows, and names of columns, that say to which split a row belongs."""
KEYS_WITHIN = ("meta", "metadata")
"""Keys of rows whose value may be an object with such a key."""
_COPIED = re.compile(r"(?P<before>.+?)( \(\d+\)| ?- Copy( \(\d+\))?| copy( \d+)?)|Copy of (?P<after>.+)")
"""Names, without their endings, that browsers and file managers give to a copy."""
_MOST_NAMED = 3
_OTHER_DATA = re.compile(
    r".*\.(jsonl|ndjson|parquet|arrows?|feather|csv|tsv|gz|zst|bz2|xz|lz4|zip|tar|tgz)", re.IGNORECASE
)
"""Endings of names that show data."""
_OF_TABLES = re.compile(r"_delta_log|\.hoodie|_temporary|.+\.metadata\.json")
"""What Delta Lake, Hudi, Spark and Iceberg keep beside files of which some no longer, or not yet, belong to a table."""


class InputFile(Section):
    """A file as it was when it was read; size and time show a change."""

    path: str
    bytes: int
    modified_ns: int

    @classmethod
    def of(cls, path: Path) -> "InputFile":
        """Returns the state of the file at `path` now."""
        status = path.stat()
        return cls(path=str(path.resolve()), bytes=status.st_size, modified_ns=status.st_mtime_ns)


def find_files(
    name: str,
    paths: Path | Sequence[Path] | None,
    *,
    suffixes: tuple[str, ...] | None,
    key: str = "path",
    of_one_split: bool = False,
) -> tuple[Path, ...]:
    """Returns the files of each path of a source, one path after the other.

    A path is a file; a folder, with the files of the given suffixes in it and in its folders; or a glob pattern. Hidden
    files are left out of folders and patterns, which are sorted by path: part by part, by code points. `key` is the
    paths' key in the source's section. With `of_one_split`, names that say other splits are not passed over.

    Raises: DataError if a path leads to no file, if two lead to the same one, or if a folder or pattern leads to files
    for training and to others for validation or test, or to copies of its own files.
    """
    if paths is None:
        raise DataError(f"source '{name}' has no path: give data.sources.{name}.{key}=FILE (a file, folder or pattern)")
    search = _Search(source=name, override=f"data.sources.{name}.{key}=FILE", suffixes=suffixes)
    found: dict[object, tuple[Path, Path]] = {}
    for path in (paths,) if isinstance(paths, Path) else paths:
        try:
            files = search.files_of(path)
            if of_one_split and not path.is_file():
                refuse_mixed_splits(name, files, path, key)
                _refuse_copies(name, files, key)
            for file in files:
                target = _identity(file)
                if target in found:
                    raise _found_twice(name, key, first=found[target], second=(file, path))
                found[target] = (file, path)
        except OSError as error:
            raise DataError(f"source '{name}': {path} cannot be read: {error.strerror}") from error
    return tuple(file for file, _ in found.values())


def _identity(file: Path) -> object:
    """Returns what two names of a file have in common: where links lead, and the inode of one with several names."""
    status = file.stat()
    return file.resolve() if status.st_nlink == 1 else (status.st_dev, status.st_ino)


@dataclass(frozen=True, kw_only=True)
class SourceFiles:
    """The files of a source."""

    training: tuple[Path, ...]
    validation: tuple[Path, ...]
    """Files of documents that are held out; none if the section names no such files."""

    @classmethod
    def find(
        cls,
        name: str,
        source: SourceOfFiles | Hdf5Source,
        *,
        suffixes: tuple[str, ...] | None,
    ) -> "SourceFiles":
        """Finds the files of the source with this name.

        Raises: DataError as `find_files`, and for a file that is both for training and for validation.
        """
        training = find_files(name, source.path, suffixes=suffixes, of_one_split=True)
        if source.validation_path is None:
            return cls(training=training, validation=())
        key = "validation_path"
        validation = find_files(name, source.validation_path, suffixes=suffixes, key=key, of_one_split=True)
        held_out = set(map(_identity, validation))
        shared = [path for path in training if _identity(path) in held_out]
        if shared:
            raise DataError(
                f"source '{name}': {shared[0]} belongs to path and to validation_path: validation files must not be "
                f"trained on; correct data.sources.{name}.path"
            )
        return cls(training=training, validation=validation)


def split_of(name: str) -> str | None:
    """Returns the split that a name says, without its ending: `train`, `validation` or `test`; None if it says none.

    Numbers do not count: `train-00000-of-00002`, `wikiDev` and `test2` say one, and `how_to_train_a_dog` none. A name
    that says training and another split says the other: `train_test`.
    """
    divided = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    words = [word.rstrip("0123456789") for word in re.split(r"[\W_]+", divided)]
    words = [word for word in words if word and word not in ("of", "v", "part", "shard")]
    is_title = len(words) > _MOST_WORDS or not _OF_TITLES.isdisjoint(words)
    said = [words[0], words[-1]] if is_title else words
    return next((split for split, known in _SPLITS.items() if any(map(known.fullmatch, said))), None)


def refuse_splits(names: Sequence[str], remedy: str) -> None:
    """Looks at the names of the sources of a mixture; a warning names those that seem to be held out.

    Raises: DataError, ending in `remedy`, if they are splits: `train` and `test`.
    """
    said = {name: split_of(name) for name in names}
    exact = {said[name] for name in names if any(known.fullmatch(name.lower()) for known in _SPLITS.values())}
    if "train" in exact and len(exact) > 1:
        raise DataError(f"the documents are of the splits {', '.join(names)}, {remedy}")
    others = [name for name, split in said.items() if split in ("validation", "test")]
    if 0 < len(others) < len(names):
        _warn_once(
            f"the sources {', '.join(others)} are trained on, and their names say that they are held out: if they are, "
            "leave them out"
        )


def _split_said(key: str, value: str) -> str | None:
    """Returns the split of a row; a key that may mean something else says one by the name of a split alone."""
    is_exact = any(known.fullmatch(value.lower()) for known in _SPLITS.values())
    return split_of(value) if is_exact or "split" in key.lower() else None


class SplitsOfRows:
    """Sees the values by which rows that are read together say their split."""

    def __init__(self) -> None:
        self._last: object = None
        self._said: dict[bool, str] = {}

    def see(self, key: str, value: object, where: Callable[[], str]) -> None:
        """Takes the value of one more row. Raises: DataError if one is for training and another is held out."""
        if value == self._last or not isinstance(value, str):
            return
        self._last, split = value, _split_said(key, value)
        if split is not None:
            self._said.setdefault(split == "train", value)
        if len(self._said) > 1:
            raise DataError(
                f"{where()}: '{key}' is {value!r}, and other rows say {self._said[split != 'train']!r}: rows of "
                f"several splits would be trained on. Write those of one split by themselves, or remove '{key}' if it "
                "says something else"
            )


def refuse_split_column(dataset: Any, label: str) -> None:
    """Raises DataError if a column of a Hugging Face dataset says that its rows are of several splits."""
    for key in SPLIT_KEYS:
        feature = dataset.features.get(key)
        name_of = getattr(feature, "int2str", None)  # of a ClassLabel
        if name_of is None and getattr(feature, "dtype", None) not in ("string", "large_string"):
            continue
        splits = SplitsOfRows()
        for value in dataset.select_columns([key]).unique(key):  # which copies a column of chosen rows
            splits.see(key, value if name_of is None or value is None else name_of(value), lambda: label)


def _split_of_file(file: Path, base: Path) -> str | None:
    """Returns the split that the folders of a file below `base` or its own name say; held out, if one says so."""
    parts = file.relative_to(base).parts if file.is_relative_to(base) else (file.name,)
    endings = (file.suffix, "".join(file.suffixes[-2:]), "")  # the last: some have the split as their ending
    names = [*parts[:-1], *(parts[-1].removesuffix(ending) for ending in endings)]
    said = set(map(split_of, names))
    return next((split for split in _SPLITS if split in said), None)


def refuse_mixed_splits(source: str, files: Iterable[Path], path: Path, key: str, *, kinds: str = "") -> None:
    """Looks at the names of the files of a folder or pattern; a warning names those that seem to be held out.

    Held out may be, too, what stands beside files for training and says nothing. `kinds` follows the key in messages:
    the kinds of sources that have it, if it is not one of this source.

    Raises: DataError if some say that they are for training, and others for validation or test.
    """
    base = path if path.is_dir() else _before_glob(path)
    place = f"data.sources.{source}.{key}{kinds}"
    splits: dict[str | None, list[Path]] = {}
    for file in files:
        splits.setdefault(_split_of_file(file, base), []).append(file)
    others = [file for split in ("validation", "test") for file in splits.get(split, [])]
    if not others:
        if key == "path" and "train" in splits and None in splits:
            _warn_once(
                f"source '{source}' trains on {_named(splits[None])} beside {_named(splits['train'])}, which alone say "
                f"that they are for training: if the others are held out, leave them out of {place}"
            )
        return
    if "train" in splits:
        raise DataError(
            f"source '{source}': {path} leads to files of several splits, {_named(splits['train'])} for training, and "
            f"{_named(others)}: name one split, by its files, its folder or a pattern such as '*train*', in "
            f"{place}{'' if kinds else ' (`evenpack new`: in --data)'}"
        )
    named = [base.resolve().name, *path.parts[len(base.parts) :]]
    if key == "path" and not any(map(split_of, named)):
        _warn_once(
            f"source '{source}' trains on {_named(others)}, whose names say that they are held out: if they are, name "
            f"the others in {place} (by files, a folder or a pattern)"
        )


def _refuse_copies(source: str, files: Sequence[Path], key: str) -> None:
    """Raises DataError for a file beside its copy, also a compressed one."""
    seen: dict[str, Path] = {}
    for file in files:
        other = seen.setdefault(re.sub(r"\.(gz|zst)$", "", str(file)), file)
        if other != file:
            raise DataError(
                f"source '{source}' leads to {other} and {file}, of which one is the other compressed, by their names: "
                f"remove one, or name the files in data.sources.{source}.{key}"
            )
    for name, file in seen.items():
        if (copied := _COPIED.fullmatch(Path(name).stem)) is None:
            continue
        original = seen.get(str(Path(name).with_stem(copied["before"] or copied["after"])))
        if original is not None and original.stat().st_size == file.stat().st_size:
            raise DataError(
                f"source '{source}' leads to {original} and {file}, of which one is a copy of the other, by their "
                f"names and sizes: remove one, or name the files in data.sources.{source}.{key}"
            )


def _named(files: Sequence[Path]) -> str:
    more = len(files) - _MOST_NAMED
    return ", ".join(map(str, files[:_MOST_NAMED])) + (f" and {more:,} more" if more > 0 else "")


@cache
def _warn_once(message: str) -> None:
    log.warning("%s", message)


def files_below(folder: Path) -> tuple[Path, ...]:
    """Returns the files in a folder and in its folders, sorted by path, without hidden ones."""
    return tuple(sorted(found for found in folder.rglob("*") if found.is_file() and not _is_hidden(found, folder)))


@dataclass(frozen=True, kw_only=True)
class _Search:
    """The common settings for all paths of a source."""

    source: str
    override: str
    suffixes: tuple[str, ...] | None

    def files_of(self, path: Path) -> tuple[Path, ...]:
        """Returns the files of a path. Raises: DataError if there are none."""
        if path.is_file():
            return (path,)
        if path.is_dir():
            return self._of_folder(path)
        if path.exists():
            raise DataError(f"source '{self.source}': {path} is neither a file nor a folder; give {self.override}")
        return self._of_pattern(path)

    def _of_folder(self, folder: Path) -> tuple[Path, ...]:
        below = files_below(folder)
        files = tuple(file for file in below if self.suffixes is None or file.name.endswith(self.suffixes))
        self._look_beside(folder, files, below)
        if not files:
            expected = "files" if self.suffixes is None else " or ".join(f"*{suffix}" for suffix in self.suffixes)
            raise DataError(f"source '{self.source}': folder {folder} holds no {expected}; give {self.override}")
        return files

    def _look_beside(self, folder: Path, files: Sequence[Path], below: Sequence[Path]) -> None:
        """Warns of what seems to be data in a folder and is not read.

        Raises: DataError for a folder of a table whose files do not all count.
        """
        others = [file for file in below if file not in {*files} and _OTHER_DATA.fullmatch(file.name)]
        for one in sorted(folder.rglob("*")):
            if _OF_TABLES.fullmatch(one.name):
                raise DataError(
                    f"source '{self.source}': {one} shows that {folder} is a table of which some files were replaced "
                    f"or are not finished (Delta Lake, Iceberg, Hudi, Spark), and all would be read: write its rows to "
                    f"files of their own, or name its files in {self.override}"
                )
            if one.is_symlink() and one.is_dir():
                others.append(one)  # which Python does not follow
        if files and others:
            _warn_once(
                f"source '{self.source}' does not read {_named(others)} in {folder}, since its kind reads "
                f"{' and '.join(self.suffixes or ('any file',))}, and links to folders are not followed: if they "
                f"belong to it, rename or convert them, or name a linked folder in {self.override} too"
            )

    def _of_pattern(self, pattern: Path) -> tuple[Path, ...]:
        """Returns the files that match."""
        if any("**" in part and part != "**" for part in pattern.parts):  # Python 3.13 would read it as a single *
            raise DataError(
                f"source '{self.source}': {pattern} is not a glob pattern: ** matches folders of any depth and must "
                "stand alone between slashes, as in **/*.jsonl"
            )
        matches = sorted(Path(pattern.anchor or ".").glob(str(pattern.relative_to(pattern.anchor))))
        base = _before_glob(pattern)
        files = tuple(match for match in matches if match.is_file() and not _is_hidden(match, base))
        if not files:
            raise DataError(
                f"source '{self.source}': {pattern} does not exist, and no file matches it; give {self.override}"
            )
        return files


def _before_glob(pattern: Path) -> Path:
    """Returns the folder from which a pattern begins to choose; its own part of the path may be hidden."""
    return Path(*takewhile(lambda part: not _GLOB_CHARACTERS & set(part), pattern.parts[:-1]))


def _is_hidden(path: Path, base: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(base).parts)


def _found_twice(name: str, key: str, *, first: tuple[Path, Path], second: tuple[Path, Path]) -> DataError:
    (file, path), (other_file, other_path) = first, second
    same = f"{file} twice" if file == other_file else f"{file} and {other_file}, which are the same file"
    by = f"by {path}" if path == other_path else f"by {path} and by {other_path}"
    return DataError(
        f"source '{name}' leads to {same} ({by}): leave one out of data.sources.{name}.{key}; to read a source more "
        "often than others, raise its weight"
    )
