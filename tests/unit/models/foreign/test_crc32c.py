"""CRC-32C agrees with published values and with the division bit by bit."""

import numpy as np
import pytest

from evenpack.models.foreign.tensor_bundle import crc32c


def bit_by_bit(data: bytes) -> int:
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
)
def test_published_values_are_met(data: bytes, expected: int) -> None:
    """RFC 3720, appendix B.4, and the usual check value."""
    assert crc32c(np.frombuffer(data, np.uint8)) == expected


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 100, 4095, (1 << 18) - 1, 1 << 18, (1 << 18) + 5])
def test_every_length_gives_what_the_division_gives(size: int) -> None:
    """A row has 2^18 bytes."""
    data = np.random.default_rng(size).bytes(size)
    assert crc32c(np.frombuffer(data, np.uint8)) == bit_by_bit(data)
