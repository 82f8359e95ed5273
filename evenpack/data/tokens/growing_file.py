"""A file that is appended to over several calls, each of which goes on where a journal vouches for it."""

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
        """`w` begins, `a` goes on. Unbuffered: a full disk shows at a write and not in some later close()."""
        self._file = io.FileIO(self.path, mode)

    def write(self, values: Integer[np.ndarray, " _"]) -> None:
        """Appends. Raises: OSError if the disk is full; then some of it may be there."""
        assert self._file is not None, "the writer asks before"
        rest = np.ascontiguousarray(values).view(np.uint8).data
        self.digest.update(rest)
        while rest:
            rest = rest[self._file.write(rest) :]

    def flush(self) -> None:
        """To the disk; nothing where the file is closed."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def cut(self, size: int, checksum: str, *, journal: Path) -> None:
        """Cuts off what lies behind the first `size` bytes, and reads these.

        Raises: DataError if there are fewer, or if they are others than those `journal` has noted.
        """
        found = self.path.stat().st_size if self.path.is_file() else 0
        if found < size or not self.path.is_file():
            raise DataError(
                f"{self.path} has {found} bytes, but {journal} noted {size}; "
                f"remove the folder {self.path.parent} and prepare again"
            )
        os.truncate(self.path, size)
        self.digest = digest_of(self.path)
        if self.digest.whole != checksum:
            raise not_as_written(f"{self.path} is not as it was written", journal)


def not_as_written(finding: str, journal: Path) -> DataError:
    """What is said of a file that is damaged by the word of its journal."""
    return DataError(
        f"{finding}, by the checksum in {journal}; copy it again from where it is whole, or "
        f"remove the folder {journal.parent} and prepare again"
    )
