"""A file that is extended over several calls, each of which continues where a journal vouches for the content."""

import io
import os
from pathlib import Path

import numpy as np
from jaxtyping import Integer

from evenpack.data.checksums import Digest, digest_of
from evenpack.errors import DataError


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
            raise damaged_file_error(f"{self.path} is not as it was written", journal)


def damaged_file_error(finding: str, journal: Path) -> DataError:
    """Returns the error for a file that is damaged according to its journal."""
    return DataError(
        f"{finding}, by the checksum in {journal}; copy it again from an intact copy, or "
        f"remove the folder {journal.parent} and prepare again"
    )
