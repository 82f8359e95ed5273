"""The checksum CRC-32C (Castagnoli) in a few passes of numpy; Python has none.

A CRC is linear over GF(2), apart from its start and end value: that of two parts is the first one's, moved past as many
zero bytes as the second has, XOR the second one's. So a long message is folded in rows of 256 KiB, each onto the next
one, and the last row in halves, until 4 bytes are left. Moving is a look-up of each half of a 32-bit word in a table.
"""

from functools import cache

import numpy as np
import numpy.typing as npt

_POLYNOMIAL = 0x82F63B78
_ALL_ONES = 0xFFFFFFFF
_WORD = 2
_ROW = 18
"""Bytes of a word and of a row, as powers of two. The state and the tables of a row fit into a core's cache."""

Words = npt.NDArray[np.uint32]


def crc32c(data: npt.NDArray[np.uint8]) -> int:
    """CRC-32C of a vector of bytes."""
    size = min(_ROW, max(_WORD, (len(data) - 1).bit_length()))
    first = len(data) % (1 << size)
    # Zeros in front of a message do not change a CRC that begins with 0.
    filled = np.concatenate([np.zeros((1 << size) - first, np.uint8), data[:first]])
    state = filled.view("<u4")
    for row in data[first:].reshape(-1, 1 << size):
        state = _moved(state, size) ^ row.view("<u4")
    while len(state) > 1:
        size -= 1
        state = _moved(state[: len(state) // 2], size) ^ state[len(state) // 2 :]
    start = np.array([_ALL_ONES], np.uint32)
    for level in range(len(data).bit_length()):
        if len(data) >> level & 1:
            start = _moved(start, level)
    return int((_moved(state, _WORD) ^ start)[0]) ^ _ALL_ONES


def _moved(values: Words, level: int) -> Words:
    """Returns each value after 2^level zero bytes have followed it."""
    low, high = _tables(level)
    moved: Words = low.take(values & 0xFFFF) ^ high.take(values >> 16)
    return moved


@cache
def _tables(level: int) -> tuple[Words, Words]:
    """Returns the values that 2^level zero bytes give for all 65,536 lower and all 65,536 upper halves of a word."""
    if level > 0:
        low, high = _tables(level - 1)
        return _moved(low, level - 1), _moved(high, level - 1)
    low = np.arange(1 << 16, dtype=np.uint32)
    high = low << np.uint32(16)
    for _ in range(8):
        low, high = _without_lowest_bit(low), _without_lowest_bit(high)
    return low, high


def _without_lowest_bit(values: Words) -> Words:
    one = np.uint32(1)
    return (values >> one) ^ (values & one) * np.uint32(_POLYNOMIAL)
