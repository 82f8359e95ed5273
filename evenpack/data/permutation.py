"""Shuffles without memory: any element of a keyed random permutation of any size is computed on its own.

A shuffle of 1e9 elements needs no array and no state, and has an exact inverse. All arithmetic is on unsigned
64-bit integers, so the result is the same on every platform.

Sizes above 32: an alternating Feistel network on ceil(log2 size) bits, its halves as equal as possible. A result
outside the size is encrypted again until it is inside (cycle walking; fewer than two times on average). With ideal
rounds the positions of two elements are within 2.3e-4 (total variation) of uniform on six bits and more. Source: Black
and Rogaway, "Ciphers with Arbitrary Finite Domains" (2002).

Sizes up to 32: on so few bits a Feistel network is far from uniform (0.11 over the whole permutations of five elements
after eight rounds), so one element is followed through a Fisher-Yates shuffle, which is uniform at any size.
"""

from collections.abc import Iterable

import numpy as np
from jaxtyping import Int64, UInt64

from evenpack.data.keys import GOLDEN, hash64

_ONE = np.uint64(1)
_HALF_WORD = np.uint64(32)
_FEISTEL_ROUNDS = 9
_LARGEST_SHUFFLED = 32
_LARGEST_SIZE = 1 << 53
"""Largest size: bit counts are computed through float64."""
_ROUND_OFFSETS: UInt64[np.ndarray, "rounds 1"] = (np.uint64(GOLDEN) * np.arange(32, dtype=np.uint64))[:, None]
"""What is added to a key for each round. Few elements cost numpy's calls, so all rounds are prepared together."""
_CHUNK = 1 << 14
"""Elements processed together: a dozen arrays of them stay in a core's second-level cache."""


def permute(
    indices: Int64[np.ndarray, " N"],
    sizes: Int64[np.ndarray, " N"],
    keys: UInt64[np.ndarray, " N"],
    *,
    inverse: bool = False,
) -> Int64[np.ndarray, " N"]:
    """Returns the image of each index under the permutation of [0, size) chosen by `key`, element by element.

    With `inverse`, the exact inverse of that, by which one sees that no element is lost at any size.

    Raises: ValueError for an index outside [0, size).
    """
    outside = np.flatnonzero((indices < 0) | (indices >= sizes) | (sizes > _LARGEST_SIZE))
    if len(outside):  # cycle walking would never end
        place = int(outside[0])
        raise ValueError(
            f"element {place}: index {indices[place]} is outside a permutation of size {sizes[place]} "
            f"(at most {_LARGEST_SIZE})"
        )
    result = np.empty(len(indices), dtype=np.int64)
    for start in range(0, len(indices), _CHUNK):
        chunk = slice(start, start + _CHUNK)
        values, limits = indices[chunk].astype(np.uint64), sizes[chunk].astype(np.uint64)
        tiny = limits <= _LARGEST_SHUFFLED
        if tiny.any():
            values[tiny] = _shuffle(values[tiny], limits[tiny], keys[chunk][tiny], inverse=inverse)
            values[~tiny] = _walk(values[~tiny], limits[~tiny], keys[chunk][~tiny], inverse=inverse)
        else:
            values = _walk(values, limits, keys[chunk], inverse=inverse)
        result[chunk] = values.astype(np.int64)
    return result


def _shuffle(
    values: UInt64[np.ndarray, " N"], sizes: UInt64[np.ndarray, " N"], keys: UInt64[np.ndarray, " N"], *, inverse: bool
) -> UInt64[np.ndarray, " N"]:
    """Follows each value through the swaps i <-> random j <= i of a Fisher-Yates shuffle of its size."""
    places = np.arange(1, max(2, int(sizes.max(initial=1))), dtype=np.uint64)[:, None]
    hashes = hash64(keys + _ROUND_OFFSETS[1 : len(places) + 1]) >> _HALF_WORD
    others = np.where(places < sizes, hashes * (places + _ONE) >> _HALF_WORD, places)  # beyond its size no swap
    swaps = list(zip(places, others, strict=True))
    for here, other in swaps if inverse else reversed(swaps):
        values = np.where(values == here, other, np.where(values == other, here, values))
    return values


def _walk(
    values: UInt64[np.ndarray, " N"], sizes: UInt64[np.ndarray, " N"], keys: UInt64[np.ndarray, " N"], *, inverse: bool
) -> UInt64[np.ndarray, " N"]:
    """Applies the Feistel network until each value is below its size again."""
    bits = np.frexp((sizes - _ONE).astype(np.float64))[1].astype(np.uint64)
    rounds = range(_FEISTEL_ROUNDS - 1, -1, -1) if inverse else range(_FEISTEL_ROUNDS)
    round_keys = keys + _ROUND_OFFSETS[:_FEISTEL_ROUNDS]
    result = _feistel(values, bits, round_keys, rounds)
    outside = np.flatnonzero(result >= sizes)
    while len(outside):
        walked = _feistel(result[outside], bits[outside], round_keys[:, outside], rounds)
        result[outside] = walked
        outside = outside[walked >= sizes[outside]]
    return result


def _feistel(
    values: UInt64[np.ndarray, " N"],
    bits: UInt64[np.ndarray, " N"],
    round_keys: UInt64[np.ndarray, "rounds N"],
    rounds: Iterable[int],
) -> UInt64[np.ndarray, " N"]:
    """Returns the network's output; each round changes one half by a hash of the other, and is its own inverse."""
    high_bits = bits >> _ONE
    low_bits = bits - high_bits
    low_mask = (_ONE << low_bits) - _ONE
    high_mask = (_ONE << high_bits) - _ONE
    low, high = values & low_mask, values >> low_bits
    for i in rounds:
        if i % 2 == 0:
            low ^= hash64(high ^ round_keys[i]) & low_mask
        else:
            high ^= hash64(low ^ round_keys[i]) & high_mask
    return (high << low_bits) | low


def sequence_id_type(sequences: int) -> np.dtype:
    """Returns the smallest integer type for so many sequence ids: int32 up to 2**31 of them, int64 beyond."""
    return np.dtype(np.int32 if sequences <= 1 << 31 else np.int64)
