"""Checkpoints of TensorFlow (`tf.train.Saver`, format V2): PREFIX.index and PREFIX.data-0000I-of-0000N.

The index is a sorted table of LevelDB, of names; each value gives a tensor's data file, offset and checksum.

    file:   blocks ..., index block, footer
    block:  entries, restart points, their count (4 bytes); then whether that is compressed (1 byte) and a checksum (4)
    entry:  bytes of the key shared with the one before, bytes of its own, bytes of the value (varints); key; value
    handle: where a block begins and its length (varints); each value of the index block is one
    footer: handles of a block that is not needed here and of the index block, zeros up to 40 bytes, the magic number

    key ""      BundleHeaderProto   1 number of data files, 2 byte order (0: little-endian)
    key NAME    BundleEntryProto    1 type of the numbers, 2 shape, 3 data file, 4 offset in it, 5 bytes, 6 checksum,
                                    7 slices of a partitioned variable, each of which has an entry of its own

Source: LevelDB, doc/table_format.md; TensorFlow, core/protobuf/tensor_bundle.proto, core/framework/types.proto and
tensor_shape.proto.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import google_crc32c
import numpy as np
import torch
from torch import Tensor

from evenpack.errors import CheckpointError
from evenpack.files import explained


def take(stream: BytesIO, count: int) -> bytes:
    """Returns the next `count` bytes. Raises: ValueError if there are fewer."""
    data = stream.read(count)
    if len(data) < count:
        raise ValueError("it ends in the middle of an entry")
    return data


def take_varint(stream: BytesIO) -> int:
    """Returns an unsigned number of 7 bits a byte, the lowest first. Raises: ValueError if it does not end."""
    value = shift = 0
    while True:
        (byte,) = take(stream, 1)
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value


class Message:
    """The fields of one message, by their numbers in its `.proto`. Raises: ValueError for bytes that are none."""

    def __init__(self, data: bytes) -> None:
        self._numbers: dict[int, int] = {}
        self._messages: defaultdict[int, list[bytes]] = defaultdict(list)
        stream = BytesIO(data)
        while stream.tell() < len(data):
            field, kind = divmod(take_varint(stream), 8)
            match kind:
                case 0:
                    self._numbers[field] = take_varint(stream)
                case 1 | 5:
                    self._numbers[field] = int.from_bytes(take(stream, 8 if kind == 1 else 4), "little")
                case 2:
                    self._messages[field].append(take(stream, take_varint(stream)))
                case _:
                    raise ValueError(f"field {field} has the unknown type {kind}")

    def number(self, field: int) -> int:
        """Returns a field of a number; 0, the encoding's default, if it is not there."""
        return self._numbers.get(field, 0)

    def messages(self, field: int) -> Iterable["Message"]:
        """Yields a repeated field of messages, which may be absent."""
        return map(Message, self._messages[field])


_FOOTER_BYTES = 48
_MAGIC = bytes.fromhex("57fb808b247547db")
_MASK_DELTA = 0xA282EAD8


def read_table(path: Path) -> dict[bytes, bytes]:
    """Returns all keys with their values, in order. The table is read whole.

    Raises: CheckpointError if the file is missing, no such table, or damaged (by its checksums).
    """
    with explained(path, CheckpointError, missing=True):
        content = path.read_bytes()
    try:
        return dict(_entries(content))
    except ValueError as error:
        raise CheckpointError(
            f"{path} is not a whole index of a TensorFlow checkpoint: {error}; copy it again"
        ) from error


def masked_crc32c(data: bytes | np.ndarray) -> int:
    """Returns the checksum as LevelDB and TensorFlow store it: rotated, with a constant added."""
    value: int = google_crc32c.value(data)
    return ((value >> 15 | value << 17) + _MASK_DELTA) & 0xFFFFFFFF


def _entries(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    footer = BytesIO(content[-_FOOTER_BYTES:])
    if not content.endswith(_MAGIC) or len(content) < _FOOTER_BYTES:
        raise ValueError("its last bytes are not the footer of a table")
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
    import pyarrow  # a fifth of a second, which no start of a rank should take

    size = take_varint(BytesIO(block))
    return pyarrow.decompress(block, decompressed_size=size, codec="snappy", asbytes=True)


def _block_entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    restarts = int.from_bytes(block[-4:], "little")
    stream = BytesIO(block[: len(block) - 4 * (restarts + 1)])
    key, size = b"", len(stream.getvalue())
    while stream.tell() < size:
        shared, own, value = (take_varint(stream) for _ in range(3))
        key = key[:shared] + take(stream, own)
        yield key, take(stream, value)


INDEX = ".index"
_HEADER = b""
_SLICE = b"\x00"
"""First byte of the keys of slices."""

_TYPES = {
    1: torch.float32,
    2: torch.float64,
    3: torch.int32,
    4: torch.uint8,
    5: torch.int16,
    6: torch.int8,
    9: torch.int64,
    10: torch.bool,
    14: torch.bfloat16,
    19: torch.float16,
}
"""Number types by TensorFlow's code; texts, complex and quantised numbers are not weights."""


@dataclass(frozen=True, kw_only=True)
class BundleEntry:
    """The index's entry of one tensor."""

    type_code: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    checksum: int
    is_sliced: bool


class TensorBundle(Mapping[str, Tensor]):
    """The tensors of a checkpoint by name.

    Each is memory-mapped and compared with its checksum when it is first requested. Changes to it stay in memory.

    Args:
        prefix: path without `.index`.

    Raises: CheckpointError that names the file if it is missing, cut off or damaged (the index here, a data file when a
    tensor is requested), or if a tensor is not an array of numbers in one piece.
    """

    def __init__(self, prefix: Path) -> None:
        self._prefix = prefix
        index = Path(f"{prefix}{INDEX}")
        table = read_table(index)
        try:
            header = Message(table.pop(_HEADER))
            self.entries = {
                key.decode(): _read_entry(value) for key, value in table.items() if not key.startswith(_SLICE)
            }
        except (KeyError, ValueError) as error:
            raise CheckpointError(f"{index} is not an index of a TensorFlow checkpoint: {error!r}") from error
        self._shards = header.number(1)
        if header.number(2) != 0:
            raise CheckpointError(f"{index} holds big-endian numbers, which cannot be read")

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, name: str) -> Tensor:
        entry = self.entries[name]
        path = Path(f"{self._prefix}.data-{entry.shard:05d}-of-{self._shards:05d}")
        if entry.is_sliced or entry.type_code not in _TYPES:
            what = "a partitioned variable" if entry.is_sliced else f"of TensorFlow's type {entry.type_code}"
            raise CheckpointError(f"{name} in {self._prefix} is {what}, expected numbers in one piece: save it as such")
        data = _read_bytes(path, entry)
        if masked_crc32c(data) != entry.checksum:
            raise CheckpointError(f"{path} is damaged: the checksum of {name} is wrong; copy the file again")
        number_type = _TYPES[entry.type_code]
        if data.ctypes.data % number_type.itemsize:  # after a text or bytes
            data = data.copy()
        return torch.from_numpy(data).view(number_type).view(entry.shape)


def _read_entry(value: bytes) -> BundleEntry:
    message = Message(value)
    return BundleEntry(
        type_code=message.number(1),
        shape=tuple(size.number(1) for shape in message.messages(2) for size in shape.messages(2)),
        shard=message.number(3),
        offset=message.number(4),
        size=message.number(5),
        checksum=message.number(6),
        is_sliced=any(message.messages(7)),
    )


def _read_bytes(path: Path, entry: BundleEntry) -> np.ndarray:
    with explained(path, CheckpointError, missing=True):
        found = path.stat().st_size
        if found < entry.offset + entry.size:
            raise CheckpointError(
                f"{path} is cut off: expected at least {entry.offset + entry.size} bytes, found {found}; copy it again"
            )
        return np.memmap(path, np.uint8, "c", entry.offset, entry.size)
