"""The working set of a packer: unfinished strategies, indexed by the free slots of their packs."""

from itertools import chain

from evenpack.data.packing.strategy import Strategy

_BLOCK_BITS = 4096
"""Bits of a block; Python's operations on integers of this size take about 0.1 µs, hardly more than on 64 bits."""


class OpenStrategies:
    """Strategies with their counts; those that can take another sequence are stacked by free slots, the newest on top.

    `room` is the number of free slots of a pack. Finding the smallest or greatest room takes a few integer operations
    where the published listings scan all rooms, so that a packer is linear in its steps.
    """

    def __init__(self, pack_length: int, max_sequences_per_pack: int) -> None:
        self._pack_length = pack_length
        self._max_sequences = max_sequences_per_pack
        self._stacks: dict[int, list[tuple[Strategy, int]]] = {}
        self._rooms = _IntegerSet(pack_length)
        self._closed: list[tuple[Strategy, int]] = []

    def add(self, strategy: Strategy, count: int) -> None:
        """Adds `count` packs; they are closed if they are full or hold the most sequences allowed."""
        room = self._pack_length - sum(strategy)
        if room == 0 or len(strategy) == self._max_sequences:
            self._closed.append((strategy, count))
            return
        if room not in self._stacks:
            self._stacks[room] = []
            self._rooms.add(room)
        self._stacks[room].append((strategy, count))

    def take(self, room: int) -> tuple[Strategy, int]:
        """Removes the newest strategy that has exactly this room, with all its packs."""
        stack = self._stacks[room]
        strategy, count = stack.pop()
        if not stack:
            del self._stacks[room]
            self._rooms.remove(room)
        return strategy, count

    def smallest_room(self, length: int) -> int | None:
        """Returns the smallest room into which `length` fits, None if it fits nowhere."""
        return self._rooms.first_from(length)

    def greatest_room(self, length: int) -> int | None:
        """Returns the greatest room, None if `length` does not fit into it."""
        room = self._rooms.greatest()
        return room if room is not None and room >= length else None

    def counts(self) -> dict[Strategy, int]:
        """Returns all strategies, open and closed. None occurs twice, as lengths come in once each and descend."""
        return dict(chain(self._closed, *self._stacks.values()))


class _IntegerSet:
    """Integers in [0, limit] as bits of blocks, with one bit for each block that is not empty."""

    def __init__(self, limit: int) -> None:
        self._blocks = [0] * (limit // _BLOCK_BITS + 1)
        self._filled = 0

    def add(self, value: int) -> None:
        block, bit = divmod(value, _BLOCK_BITS)
        self._blocks[block] |= 1 << bit
        self._filled |= 1 << block

    def remove(self, value: int) -> None:
        block, bit = divmod(value, _BLOCK_BITS)
        self._blocks[block] &= ~(1 << bit)
        if not self._blocks[block]:
            self._filled &= ~(1 << block)

    def first_from(self, value: int) -> int | None:
        """Returns the smallest member that is `value` or more."""
        block, bit = divmod(value, _BLOCK_BITS)
        here = self._blocks[block] >> bit
        if here:
            return value + _lowest_bit(here)
        above = self._filled >> (block + 1)
        if not above:
            return None
        block += 1 + _lowest_bit(above)
        return block * _BLOCK_BITS + _lowest_bit(self._blocks[block])

    def greatest(self) -> int | None:
        if not self._filled:
            return None
        block = self._filled.bit_length() - 1
        return block * _BLOCK_BITS + self._blocks[block].bit_length() - 1


def _lowest_bit(bits: int) -> int:
    return (bits & -bits).bit_length() - 1
