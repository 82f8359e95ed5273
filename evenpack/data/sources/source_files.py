"""Finds the files of a source's `path`, in an order that is the same on every machine."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from evenpack.errors import DataError

FolderFiles = Callable[[Path], tuple[Path, ...] | None]
"""Returns the files of a folder that is a dataset, in its own order; None for any other folder."""

_GLOB_CHARACTERS = frozenset("*?[")


def find_files(
    name: str,
    paths: Path | Sequence[Path] | None,
    *,
    suffixes: tuple[str, ...] | None,
    key: str = "path",
    own_files: FolderFiles = lambda _: None,
) -> tuple[Path, ...]:
    """Returns the files of each path of a source, one path after the other.

    A path is a file; a folder, with the files of the given suffixes in it and in its folders; or a glob pattern. Hidden
    files are left out of folders and patterns, which are sorted by path: part by part, by code points. `key` is the
    paths' key in the source's section.

    Raises: DataError if a path leads to no file, or if two lead to the same one.
    """
    if paths is None:
        raise DataError(f"source '{name}' has no path: give data.sources.{name}.{key}=FILE (a file, folder or pattern)")
    search = _Search(source=name, override=f"data.sources.{name}.{key}=FILE", suffixes=suffixes, own_files=own_files)
    found: dict[Path, tuple[Path, Path]] = {}
    for path in (paths,) if isinstance(paths, Path) else paths:
        try:
            for file in search.files_of(path):
                target = file.resolve()
                if target in found:
                    raise _found_twice(name, key, first=found[target], second=(file, path))
                found[target] = (file, path)
        except OSError as error:
            raise DataError(f"source '{name}': {path} cannot be read: {error.strerror}") from error
    return tuple(file for file, _ in found.values())


def refuse_shared_files(name: str, training: Sequence[Path], validation: Sequence[Path]) -> None:
    """Checks that no file is both for training and for validation. Raises: DataError naming the first that is."""
    shared = {path.resolve() for path in training} & {path.resolve() for path in validation}
    if shared:
        raise DataError(
            f"source '{name}': {min(shared)} belongs to path and to validation_path: validation files must not be "
            f"trained on; correct data.sources.{name}.path"
        )


def files_below(folder: Path) -> tuple[Path, ...]:
    """Returns the files in a folder and in its folders, sorted by path, without hidden ones."""
    return tuple(sorted(found for found in folder.rglob("*") if found.is_file() and not _is_hidden(found, folder)))


@dataclass(frozen=True, kw_only=True)
class _Search:
    """The common settings for all paths of a source."""

    source: str
    override: str
    suffixes: tuple[str, ...] | None
    own_files: FolderFiles

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
        own = self.own_files(folder)
        if own is not None:
            return own
        files = tuple(
            file for file in files_below(folder) if self.suffixes is None or file.name.endswith(self.suffixes)
        )
        if not files:
            expected = "files" if self.suffixes is None else " or ".join(f"*{suffix}" for suffix in self.suffixes)
            raise DataError(f"source '{self.source}': folder {folder} holds no {expected}; give {self.override}")
        for inner in sorted({file.parent for file in files}):
            if self.own_files(inner) is not None:
                raise DataError(
                    f"source '{self.source}': folder {folder} holds {inner}, which is a dataset of its own: give that "
                    f"folder, a list of such folders, or a pattern, instead of FILE in {self.override}"
                )
        return files

    def _of_pattern(self, pattern: Path) -> tuple[Path, ...]:
        """Returns files that match, and those of matching folders that are datasets."""
        if any("**" in part and part != "**" for part in pattern.parts):  # Python 3.13 would read it as a single *
            raise DataError(
                f"source '{self.source}': {pattern} is not a glob pattern: ** matches folders of any depth and must "
                "stand alone between slashes, as in **/*.jsonl"
            )
        matches = sorted(Path(pattern.anchor or ".").glob(str(pattern.relative_to(pattern.anchor))))
        base = _before_glob(pattern)
        files = tuple(file for match in matches if not _is_hidden(match, base) for file in self._of_match(match))
        if not files:
            raise DataError(
                f"source '{self.source}': {pattern} does not exist, and no file matches it; give {self.override}"
            )
        return files

    def _of_match(self, match: Path) -> tuple[Path, ...]:
        if match.is_file():
            return (match,)
        return (self.own_files(match) or ()) if match.is_dir() else ()


def _before_glob(pattern: Path) -> Path:
    """Returns the folder from which a pattern begins to choose; its own part of the path may be hidden."""

    def plain_parts() -> Iterator[str]:
        for part in pattern.parts[:-1]:
            if _GLOB_CHARACTERS & set(part):
                return
            yield part

    return Path(*plain_parts())


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
