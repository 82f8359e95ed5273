"""The journal `PREFIX.journal.json`: the progress of a token file, and, once it is complete, its record."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from evenpack.data.checksums import Checksums, checksum_of_json
from evenpack.errors import DataError
from evenpack.files import read_json, write_json

DOCUMENT_HASHES = "document_hashes"
"""The column of every token file that was made from text."""


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
    if not path.is_file():
        return None
    try:
        values = read_json(path)
        checksum = values.pop("checksum", None)  # None in journals of older versions
        if checksum not in (None, checksum_of_json(values)):
            raise ValueError(f"its content does not have its checksum {checksum}")
        checksums = {name: Checksums(**_with_tuple(found)) for name, found in values.pop("checksums").items()}
        return Journal(**values, checksums=checksums)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; make it readable for this user") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(
            f"{path} is damaged, or no journal of a token file ({error}); remove the folder {path.parent} and prepare "
            "again"
        ) from error


def write_journal(prefix: Path, journal: Journal) -> None:
    """Writes the journal of a token file, with a checksum of its content."""
    content = asdict(journal)
    write_json(journal_path(prefix), content | {"checksum": checksum_of_json(content)})


def _with_tuple(checksums: dict[str, Any]) -> dict[str, Any]:
    return {**checksums, "chunks": tuple(checksums["chunks"])}
