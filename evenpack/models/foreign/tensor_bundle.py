"""Checkpoints of TensorFlow (`tf.train.Saver`, format V2): PREFIX.index and PREFIX.data-0000I-of-0000N.

The index is a table of names; each value gives a tensor's data file, offset and checksum.

    key ""      BundleHeaderProto   1 number of data files, 2 byte order (0: little-endian)
    key NAME    BundleEntryProto    1 type of the numbers, 2 shape, 3 data file, 4 offset in it, 5 bytes, 6 checksum,
                                    7 slices of a partitioned variable, each of which has an entry of its own

Source: TensorFlow, core/protobuf/tensor_bundle.proto, core/framework/types.proto and tensor_shape.proto.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from evenpack.errors import CheckpointError
from evenpack.models.foreign.table import masked_crc32c, read_table
from evenpack.models.foreign.wire import Message

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
    try:
        found = path.stat().st_size
        if found < entry.offset + entry.size:
            raise CheckpointError(
                f"{path} is cut off: expected at least {entry.offset + entry.size} bytes, found {found}; copy it again"
            )
        return np.memmap(path, np.uint8, "c", entry.offset, entry.size)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}; the index needs it") from error
