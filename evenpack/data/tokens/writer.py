"""Writes a token file so that a kill at any moment costs no more than the last batch.

While a file is written its folder holds PREFIX.{bin,sizes,COLUMN}.partial and PREFIX.journal.json. The journal records
how much data is on disk; a resumed writer first cuts off everything after that. The last journal is complete, is
written before the first rename, and stays: it is the record of the file.

A *column* is an array that grows with the documents, with one or more values per document; finished, it is COLUMN.npy.
"""

import io
import json
import os
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Integer

from evenpack.data.checksums import (
    Checksums,
    Damage,
    Digest,
    digest_of,
    find_first_damage,
    with_checksum,
    without_checksum,
)
from evenpack.data.tokens.file import bin_path, index_path, token_type, write_index
from evenpack.errors import DataError
from evenpack.files import explained, fsync_directory, read_json, write_json

DOCUMENT_HASHES = "document_hashes"
"""The column of every token file that was made from text."""
HASH_COLUMN: Mapping[str, str] = {DOCUMENT_HASHES: "<u8"}
"""XXH3 (64 bits) of each document's text."""
COMMIT_SECONDS = 5.0
"""Seconds between the commits of a long write, which is the most work that a kill can lose."""
_LONGEST_DOCUMENT = (1 << 31) - 1


@dataclass(frozen=True, kw_only=True)
class Journal:
    """The progress of a token file; the complete journal is its record."""

    complete: bool
    vocabulary_size: int
    documents: int
    tokens: int
    column_values: dict[str, int]
    """Number of values of each column, by name."""
    content: dict[str, str]
    """XXH3 (128 bits) of each unfinished file, up to the length that the journal vouches for; empty once complete."""
    checksums: dict[str, Checksums]
    """Checksums by file name; empty until complete."""
    state: dict[str, Any]
    """The caller's own state, as given to the last `commit` or `finish`."""


def journal_path(prefix: Path) -> Path:
    """Returns the path of the journal of a token file."""
    return prefix.with_name(f"{prefix.name}.journal.json")


def column_path(prefix: Path, column: str) -> Path:
    """Returns the path of a finished column, next to the pair."""
    return prefix.with_name(f"{column}.npy")


def hashes_path(prefix: Path) -> Path:
    """Returns the path of `document_hashes.npy` next to the pair: uint64[documents]."""
    return column_path(prefix, DOCUMENT_HASHES)


def read_journal(prefix: Path) -> Journal | None:
    """Reads the journal of a complete or partial file, None if there is none. Raises: DataError if it is broken."""
    path = journal_path(prefix)
    try:
        with explained(path, DataError):
            values = without_checksum(read_json(path))
        checksums = {name: Checksums.of_json(found) for name, found in values.pop("checksums").items()}
        return Journal(**values, checksums=checksums)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(
            f"{path} is damaged, or no journal of a token file ({error}); remove the folder {path.parent} and prepare "
            "again"
        ) from error


class GrowingFile:
    """Appends raw values to a file and keeps the digest of all of them; closed until `open`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.digest = Digest()
        self._file: io.FileIO | None = None

    @property
    def is_open(self) -> bool:
        return self._file is not None

    def open(self, mode: str) -> None:
        """Opens the file: `w` begins, `a` continues. Unbuffered: a full disk fails a write and not a later close()."""
        self._file = io.FileIO(self.path, mode)

    def write(self, values: Integer[np.ndarray, " _"]) -> None:
        """Appends bytes. Raises: OSError if the disk is full; some of them may be written then."""
        assert self._file is not None, "the writer checks before"
        rest = np.ascontiguousarray(values).view(np.uint8).data
        self.digest.update(rest)
        while rest:
            rest = rest[self._file.write(rest) :]

    def flush(self) -> None:
        """Flushes to disk; does nothing if the file is closed."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def cut(self, size: int, checksum: str, *, journal: Path) -> None:
        """Cuts off everything after the first `size` bytes, and reads these.

        Raises: DataError if there are fewer, or if they differ from those recorded in `journal`.
        """
        found = self.path.stat().st_size if self.path.is_file() else 0
        if found < size or not self.path.is_file():
            raise DataError(
                f"{self.path} has {found} bytes, but {journal} recorded {size}; "
                f"remove the folder {self.path.parent} and prepare again"
            )
        os.truncate(self.path, size)
        self.digest = digest_of(self.path)
        if self.digest.whole != checksum:
            damage = Damage(path=self.path, problem="is not as it was written", first_bad_byte=None)
            raise damaged_file_error(damage, journal)


def damaged_file_error(damage: Damage, journal: Path) -> DataError:
    """Returns the error for a file that is damaged according to its journal, or unreadable."""
    return DataError(
        damage.unreadable
        or f"{damage.describe()}, by the checksum in {journal}; copy it again from an intact copy, or remove the "
        f"folder {journal.parent} and prepare again"
    )


class TokenFileWriter:
    """Appends documents in batches, survives a kill at any moment, and publishes the finished files together.

    A finished file of the same name stays readable until `finish` replaces it.
    """

    def __init__(
        self,
        prefix: Path,
        *,
        vocabulary_size: int,
        columns: Mapping[str, str] = HASH_COLUMN,
        journal: Journal | None = None,
    ) -> None:
        """Begins a new file: unfinished files of an earlier writer of this name are removed.

        Args:
            columns: numpy's name of each column's type, little-endian.
            journal: that of an earlier writer, who used the same settings; `resume` passes it.
        """
        self.prefix = prefix.absolute()
        self.dtype = token_type(vocabulary_size)
        self._columns = {name: np.dtype(kind) for name, kind in columns.items()}
        self._files = {kind: GrowingFile(self._partial(kind)) for kind in ("bin", "sizes", *columns)}
        self._commit_seconds = time.monotonic()
        self._journal = journal or Journal(
            complete=False,
            vocabulary_size=vocabulary_size,
            documents=0,
            tokens=0,
            column_values=dict.fromkeys(columns, 0),
            content={},
            checksums={},
            state={},
        )
        self.documents, self.tokens = self._journal.documents, self._journal.tokens
        self._column_values = dict(self._journal.column_values)
        if journal is None:
            self._remove_unfinished()
            self.prefix.parent.mkdir(parents=True, exist_ok=True)
            self._open("w")
        elif journal.complete:
            self._refuse_damage()
        else:
            self._cut_to_journal()
            self._open("a")

    @classmethod
    def resume(
        cls, prefix: Path, *, vocabulary_size: int, columns: Mapping[str, str] = HASH_COLUMN
    ) -> "TokenFileWriter":
        """Continues from the journal, or begins a new file if there is none. `state` holds the caller's progress.

        Files of an earlier writer are read and compared with the journal's checksums.

        Raises: DataError if the journal is of another vocabulary or other columns, or the files are shorter than it
        says or damaged.
        """
        journal = read_journal(prefix)
        if journal is not None and journal.vocabulary_size != vocabulary_size:
            raise DataError(
                f"{journal_path(prefix)} was begun with a vocabulary of {journal.vocabulary_size}, now it is "
                f"{vocabulary_size}; remove the folder {prefix.parent} and prepare again"
            )
        if journal is not None and journal.column_values.keys() != columns.keys():
            raise DataError(
                f"{journal_path(prefix)} was begun with the columns {', '.join(journal.column_values)}, now they are "
                f"{', '.join(columns)}; remove the folder {prefix.parent} and prepare again"
            )
        return cls(prefix, vocabulary_size=vocabulary_size, columns=columns, journal=journal)

    @property
    def state(self) -> dict[str, Any]:
        """The caller's state at the last commit."""
        return self._journal.state

    @property
    def complete(self) -> bool:
        """Whether the file is complete: nothing can be appended, and `finish` only renames the remaining files."""
        return self._journal.complete

    def append(
        self,
        tokens: Integer[np.ndarray, " tokens"],
        lengths: Integer[np.ndarray, " documents"],
        columns: Mapping[str, Integer[np.ndarray, " _"]],
    ) -> None:
        """Appends documents that are concatenated in `tokens`, with their values of each column.

        Raises: DataError naming the document with a token id outside the vocabulary; RunError if the disk is full.
        """
        self._check(tokens, lengths)
        if not self._files["bin"].is_open:
            raise ValueError(f"the writer of {self.prefix} is closed or finished")
        if columns.keys() != self._columns.keys():
            raise ValueError(f"expected values for the columns {sorted(self._columns)}, got {sorted(columns)}")
        with explained(self.prefix, action="written"):
            self._files["bin"].write(tokens.astype(self.dtype, copy=False))
            self._files["sizes"].write(lengths.astype("<i4", casting="same_kind", copy=False))
            for name, values in columns.items():
                self._files[name].write(values.astype(self._columns[name], casting="same_kind", copy=False))
                self._column_values[name] += len(values)
        self.documents += len(lengths)
        self.tokens += len(tokens)

    @property
    def is_commit_due(self) -> bool:
        """Whether `COMMIT_SECONDS` have passed since the last commit."""
        return time.monotonic() - self._commit_seconds >= COMMIT_SECONDS

    def commit(self, state: dict[str, Any]) -> None:
        """Flushes to disk and records it: a resumed writer continues from here. `state` must be JSON."""
        with explained(self.prefix, action="written"):
            self._write_journal(state, checksums={})
        self._commit_seconds = time.monotonic()

    def finish(self, state: dict[str, Any] | None = None) -> Journal:
        """Writes index and hashes and renames all files to their final names, the index last; safe to call again.

        `state` replaces the state of the last commit, unless the file is complete. Returns: the record of the file.
        """
        with explained(self.prefix, action="written"):
            if not self.complete:
                self._write_journal(self.state if state is None else state, checksums={})
                self.close()
                self._write_index_and_columns()
                checksums = {final.name: self._checksums(partial) for partial, final in self._renames()}
                self._write_journal(self.state, checksums=checksums)
            self._put_in_place()
        return self._journal

    def abandon(self) -> None:
        """Removes unfinished files; an earlier finished file of this name stays."""
        self.close()
        self._remove_unfinished()

    def close(self) -> None:
        """Closes the files. Data after the last commit will be cut off."""
        for file in self._files.values():
            file.close()

    def __enter__(self) -> "TokenFileWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self, tokens: Integer[np.ndarray, " tokens"], lengths: Integer[np.ndarray, " documents"]) -> None:
        if lengths.sum() != len(tokens) or (len(lengths) and lengths.min() < 1):
            raise ValueError(
                f"{len(tokens)} tokens came for {len(lengths)} documents of {lengths.sum()} tokens, "
                "each of which must have one or more"
            )
        size = self._journal.vocabulary_size
        if len(tokens) and (int(tokens.min()) < 0 or int(tokens.max()) >= size):
            position = int(np.argmax((tokens < 0) | (tokens >= size)))
            document = self.documents + int(np.searchsorted(np.cumsum(lengths), position, side="right"))
            raise DataError(
                f"document {document} for {self.prefix} holds token id {tokens[position]}, but the vocabulary has "
                f"{size} entries; give the vocabulary of the tokenizer that made it"
            )
        if len(lengths) and int(lengths.max()) > _LONGEST_DOCUMENT:
            raise DataError(
                f"document {self.documents + int(lengths.argmax())} for {self.prefix} has {lengths.max()} tokens, but "
                f"the index can hold {_LONGEST_DOCUMENT}; split it"
            )

    def _open(self, mode: str) -> None:
        for file in self._files.values():
            file.open(mode)

    def _partial(self, kind: str) -> Path:
        return self.prefix.with_name(f"{self.prefix.name}.{kind}.partial")

    def _renames(self) -> list[tuple[Path, Path]]:
        """Returns unfinished and finished names in the order of the renames; the index, last, completes the file."""
        columns = [column_path(self.prefix, name) for name in self._columns]
        finals = [bin_path(self.prefix), *columns, index_path(self.prefix)]
        return [(final.with_name(f"{final.name}.partial"), final) for final in finals]

    def _write_journal(self, state: dict[str, Any], *, checksums: dict[str, Checksums]) -> None:
        for file in self._files.values():
            file.flush()
        journal = replace(
            self._journal,
            complete=bool(checksums),
            documents=self.documents,
            tokens=self.tokens,
            column_values=dict(self._column_values),
            content={} if checksums else {kind: file.digest.whole for kind, file in self._files.items()},
            checksums=checksums,
            state=json.loads(json.dumps(state)),  # as a resumed writer will see it
        )
        write_json(journal_path(self.prefix), with_checksum(asdict(journal)))
        self._journal = journal

    def _cut_to_journal(self) -> None:
        columns = [self._columns[name].itemsize * values for name, values in self._column_values.items()]
        sizes = (self.tokens * self.dtype.itemsize, 4 * self.documents, *columns)
        for (kind, file), size in zip(self._files.items(), sizes, strict=True):
            file.cut(size, self._journal.content[kind], journal=journal_path(self.prefix))

    def _refuse_damage(self) -> None:
        """Checks a complete file, whose names may still be temporary."""
        for partial, final in self._renames():
            path = partial if partial.exists() else final
            damage = find_first_damage(path, self._journal.checksums[final.name])
            if damage is not None:
                raise damaged_file_error(damage, journal_path(self.prefix))

    def _checksums(self, partial: Path) -> Checksums:
        """Returns checksums: of the tokens as they were appended; of derived files as they are on disk."""
        return (self._files["bin"].digest if partial == self._partial("bin") else digest_of(partial)).checksums()

    def _write_index_and_columns(self) -> None:
        lengths = (
            np.memmap(self._partial("sizes"), dtype="<i4", mode="r") if self.documents else np.empty(0, dtype="<i4")
        )
        _, *columns, (index, _) = self._renames()
        write_index(index, self.dtype, lengths)
        for (partial, _), (name, kind) in zip(columns, self._columns.items(), strict=True):
            with partial.open("wb") as file, self._partial(name).open("rb") as raw:
                header = {"descr": kind.str, "fortran_order": False, "shape": (self._column_values[name],)}
                np.lib.format.write_array_header_1_0(file, header)
                shutil.copyfileobj(raw, file, 1 << 20)
                file.flush()
                os.fsync(file.fileno())

    def _put_in_place(self) -> None:
        (data, final_data), *columns, (index, final_index) = self._renames()
        if data.exists():
            final_index.unlink(missing_ok=True)  # removes an earlier file: its index must not be read with the new data
            fsync_directory(self.prefix.parent)
            data.replace(final_data)
        for column, final_column in columns:
            if column.exists():
                column.replace(final_column)
        fsync_directory(self.prefix.parent)
        if index.exists():
            index.replace(final_index)
        fsync_directory(self.prefix.parent)
        for path in [*map(self._partial, self._files), *self._unfinished_journals()]:
            path.unlink(missing_ok=True)

    def _unfinished_journals(self) -> Iterable[Path]:
        """Returns what killed writers have left of journals, under names that no other writer takes."""
        return self.prefix.parent.glob(f".{journal_path(self.prefix).name}.*.partial")

    def _remove_unfinished(self) -> None:
        journal = journal_path(self.prefix)
        leftovers = [self._partial(kind) for kind in self._files] + [partial for partial, _ in self._renames()]
        for path in [journal, *leftovers, *self._unfinished_journals()]:
            path.unlink(missing_ok=True)
