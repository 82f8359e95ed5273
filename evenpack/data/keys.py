"""Random keys: 64-bit numbers that any whole numbers lead to, the same on every platform.

Orders, masks and pairs are drawn by such keys of (seed, purpose, place), so that each draw is found on its own, without
a state.
"""

from functools import lru_cache
from itertools import takewhile

import numpy as np
import xxhash
from jaxtyping import UInt64

GOLDEN = 0x9E3779B97F4A7C15
"""2**64 over the golden ratio: the increment of SplitMix64."""
_WORD = (1 << 64) - 1
# Made once: at a thousand values a numpy scalar costs as much as the operation on it.
_INCREMENT = np.uint64(GOLDEN)
_FIRST_FACTOR, _SECOND_FACTOR = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_FIRST_SHIFT, _SECOND_SHIFT, _THIRD_SHIFT = np.uint64(30), np.uint64(27), np.uint64(31)


def hash64(values: UInt64[np.ndarray, "..."]) -> UInt64[np.ndarray, "..."]:
    """Mixes each value into 64 bits that look random; a bijection.

    Source: SplitMix64, Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators" (2014), with
    Stafford's variant 13 of the constants.
    """
    mixed = values + _INCREMENT
    shifted = mixed >> _FIRST_SHIFT
    mixed ^= shifted
    mixed *= _FIRST_FACTOR
    np.right_shift(mixed, _SECOND_SHIFT, out=shifted)
    mixed ^= shifted
    mixed *= _SECOND_FACTOR
    np.right_shift(mixed, _THIRD_SHIFT, out=shifted)
    mixed ^= shifted
    return mixed


def derive_key(*parts: int | UInt64[np.ndarray, "..."]) -> UInt64[np.ndarray, "..."]:
    """Returns one 64-bit key from several parts, for example (seed, epoch, purpose); their order counts.

    Arrays, of one dimension or more, broadcast; integers may be negative and count modulo 2**64. Integers alone give a
    0-d array.
    """
    integers = tuple(takewhile(lambda part: not isinstance(part, np.ndarray), parts))
    key = _key_of_integers(integers)
    for part in parts[len(integers) :]:
        key = hash64(key ^ (part if isinstance(part, np.ndarray) else np.uint64(part & _WORD)))
    return key if len(integers) < len(parts) else key.reshape(())


def key_of_name(name: str) -> int:
    """Returns the key of a source, or of anything else that has a name."""
    return xxhash.xxh3_64_intdigest(name.encode())


@lru_cache(maxsize=1024)
def _key_of_integers(parts: tuple[int, ...]) -> UInt64[np.ndarray, " 1"]:
    """Returns the key of integers alone, which come first in most keys and are the same from step to step."""
    key = np.zeros(1, dtype=np.uint64)  # not a 0-d array: numpy warns of overflow there
    for part in parts:
        key = hash64(key ^ np.uint64(part & _WORD))
    key.setflags(write=False)
    return key
