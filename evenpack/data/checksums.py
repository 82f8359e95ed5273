"""Checksums of files, whole and in chunks, which detect damage and locate its start to within a chunk."""

import json
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from evenpack.files import is_missing, system_error

CHUNK_BYTES = 1 << 24
"""Bytes of a file under one checksum: a terabyte has 60,000 chunks, 1.2 MB in a manifest. Another size is another
format."""


@dataclass(frozen=True, kw_only=True)
class Checksums:
    """The size and checksums of a file as it was written."""

    bytes: int
    whole: str
    """XXH3, 128 bits, hexadecimal."""
    chunks: tuple[str, ...]
    """XXH3, 64 bits, hexadecimal, of each chunk of `CHUNK_BYTES`, including a shorter last one."""

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> "Checksums":
        """Returns what was written as JSON. Raises: TypeError or KeyError for something else."""
        return cls(**{**values, "chunks": tuple(values["chunks"])})


@dataclass(frozen=True, kw_only=True)
class Damage:
    """The damage of a file."""

    path: Path
    problem: str
    first_bad_byte: tuple[int, int] | None
    """The first and the last byte that it can be; None if the file is missing, or cannot be read."""
    unreadable: str | None = None
    """The message of an error of the system, which says nothing about the content; None: the file is damaged."""

    def describe(self) -> str:
        """Returns a description in one line; without a remedy, except for a file that cannot be read."""
        if self.unreadable is not None:
            return self.unreadable
        if self.first_bad_byte is None:
            return f"{self.path} {self.problem}"
        first, last = self.first_bad_byte
        place = f"is byte {first:,}" if first == last else f"is within bytes {first:,} to {last:,}"
        return f"{self.path} {self.problem}: the first bad byte {place}"


class Digest:
    """The checksums of content that comes block by block."""

    def __init__(self) -> None:
        self._bytes = 0
        self._whole = xxhash.xxh3_128()
        self._chunk = xxhash.xxh3_64()
        self._chunks: list[str] = []

    def update(self, block: memoryview) -> None:
        """Adds bytes."""
        self._whole.update(block)
        while block:
            part = block[: CHUNK_BYTES - self._bytes % CHUNK_BYTES]
            self._chunk.update(part)
            self._bytes += len(part)
            if self._bytes % CHUNK_BYTES == 0:
                self._chunks.append(self._chunk.hexdigest())
                self._chunk.reset()
            block = block[len(part) :]

    @property
    def whole(self) -> str:
        """Returns the checksum of all bytes so far."""
        return self._whole.hexdigest()

    def checksums(self) -> Checksums:
        """Returns the checksums of all bytes so far."""
        rest = [self._chunk.hexdigest()] if self._bytes % CHUNK_BYTES else []
        return Checksums(bytes=self._bytes, whole=self.whole, chunks=(*self._chunks, *rest))


class ChunkReader(threading.local):
    """Reads files chunk by chunk into one buffer for each thread, which each call overwrites."""

    def __init__(self) -> None:
        """Prepares the buffer."""
        self._buffer = np.empty(CHUNK_BYTES, dtype=np.uint8).data  # most files need little of it

    def read(self, path: Path, chunk: int) -> memoryview:
        """Reads chunk number `chunk`, which is shorter at the end of the file. Raises: OSError."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            begin, filled = chunk * CHUNK_BYTES, 0
            while filled < CHUNK_BYTES:
                count = os.preadv(descriptor, [self._buffer[filled:]], begin + filled)
                if not count:
                    break
                filled += count
        finally:
            os.close(descriptor)
        return self._buffer[:filled]


def digest_of(path: Path) -> Digest:
    """Returns the digest of a file's bytes, which appended bytes can extend. Raises: OSError."""
    digest, reader, chunk = Digest(), ChunkReader(), 0
    while block := reader.read(path, chunk):
        digest.update(block)
        chunk += 1
    return digest


def find_wrong_size(path: Path, expected: Checksums) -> Damage | None:
    """Returns the damage that the size of a file shows, or None."""
    try:
        size = path.stat().st_size
    except OSError as error:
        return _of_system_error(path, error)
    if size == expected.bytes:
        return None
    end = min(size, expected.bytes)
    problem = f"has {size:,} bytes, expected {expected.bytes:,}"
    return Damage(path=path, problem=problem, first_bad_byte=(end, end))


def find_damage(path: Path, expected: Checksums, reader: ChunkReader, *, chunk: int) -> Damage | None:
    """Compares one chunk of a file that has the right size."""
    begin = chunk * CHUNK_BYTES
    try:
        content = reader.read(path, chunk)
    except OSError as error:
        return _of_system_error(path, error, place=f" from byte {begin:,} on")
    if xxhash.xxh3_64_hexdigest(content) == expected.chunks[chunk]:
        return None
    last = min(begin + CHUNK_BYTES, expected.bytes) - 1
    return Damage(path=path, problem="is not as it was written", first_bad_byte=(begin, last))


def _of_system_error(path: Path, error: OSError, *, place: str = "") -> Damage:
    message = None if is_missing(error) else system_error(error, path, action="read", place=place)
    problem = f"cannot be found ({error.strerror})"
    return Damage(path=path, problem=problem, first_bad_byte=None, unreadable=message)


def find_first_damage(path: Path, expected: Checksums) -> Damage | None:
    """Reads a file up to its first damage."""
    reader = ChunkReader()
    found = find_wrong_size(path, expected)
    for chunk in range(len(expected.chunks)):
        found = found or find_damage(path, expected, reader, chunk=chunk)
    return found


def with_checksum(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the object with its checksum under the key `checksum`."""
    return {**content, "checksum": checksum_of_json(content)}


def without_checksum(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the object that `with_checksum` got. Raises: ValueError if it is not what its checksum says."""
    content = {key: value for key, value in values.items() if key != "checksum"}
    if values.get("checksum") != checksum_of_json(content):
        raise ValueError(f"its content does not have its checksum {values.get('checksum')}")
    return content


def checksum_of_json(content: Mapping[str, Any]) -> str:
    """Returns the XXH3 (128 bits, hexadecimal) of an object, independent of white space and the order of keys."""
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
