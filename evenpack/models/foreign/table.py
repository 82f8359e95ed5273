"""The sorted table of LevelDB, in which TensorFlow stores the index of a checkpoint.

    file:   blocks ..., index block, footer
    block:  entries, restart points, their count (4 bytes); then whether that is compressed (1 byte) and a checksum (4)
    entry:  bytes of the key shared with the one before, bytes of its own, bytes of the value (varints); key; value
    handle: where a block begins and its length (varints); each value of the index block is one
    footer: handles of a block that is not needed here and of the index block, zeros up to 40 bytes, the magic number

Source: LevelDB, doc/table_format.md.
"""

from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow

from evenpack.errors import CheckpointError
from evenpack.models.foreign.crc32c import crc32c
from evenpack.models.foreign.wire import take, take_varint

_FOOTER_BYTES = 48
_MAGIC = bytes.fromhex("57fb808b247547db")
_MASK_DELTA = 0xA282EAD8


def read_table(path: Path) -> dict[bytes, bytes]:
    """Returns all keys with their values, in order. The table is read whole.

    Raises: CheckpointError if the file is missing, no such table, or damaged (by its checksums).
    """
    try:
        content = path.read_bytes()
        return dict(_entries(content))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except ValueError as error:
        raise CheckpointError(
            f"{path} is not a whole index of a TensorFlow checkpoint: {error}; copy it again"
        ) from error


def masked_crc32c(data: bytes | np.ndarray) -> int:
    """Returns the checksum as LevelDB and TensorFlow store it: rotated, with a constant added."""
    value = crc32c(np.frombuffer(data, np.uint8))
    return ((value >> 15 | value << 17) + _MASK_DELTA) & 0xFFFFFFFF


def _entries(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    footer = BytesIO(content[-_FOOTER_BYTES:])
    if not content.endswith(_MAGIC) or len(content) < _FOOTER_BYTES:
        raise ValueError("its last bytes are not those of a table")
    _block(content, footer)
    for _, handle in _block_entries(_block(content, footer)):
        yield from _block_entries(_block(content, BytesIO(handle)))


def _block(content: bytes, handle: BytesIO) -> bytes:
    """Returns the block at the next handle of a stream."""
    start = take_varint(handle)
    end = start + take_varint(handle)
    kind, checksum = content[end : end + 1], content[end + 1 : end + 5]
    if masked_crc32c(content[start : end + 1]) != int.from_bytes(checksum, "little"):
        raise ValueError(f"the checksum of its bytes {start} to {end} is wrong")
    block = content[start:end]
    match kind[0]:
        case 0:
            return block
        case 1:
            return _without_snappy(block)
    raise ValueError(f"its bytes {start} to {end} use the unknown compression {kind[0]}")


def _without_snappy(block: bytes) -> bytes:
    """Decompresses a block, which begins with its uncompressed length."""
    size = take_varint(BytesIO(block))
    plain: bytes = pyarrow.decompress(block, decompressed_size=size, codec="snappy", asbytes=True)
    return plain


def _block_entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    restarts = int.from_bytes(block[-4:], "little")
    stream = BytesIO(block[: len(block) - 4 * (restarts + 1)])
    key, size = b"", len(stream.getvalue())
    while stream.tell() < size:
        shared, own, value = (take_varint(stream) for _ in range(3))
        key = key[:shared] + take(stream, own)
        yield key, take(stream, value)
