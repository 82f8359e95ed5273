"""What a rank read, as arrays, and what follows from it: coverage, order, balance and borders. It needs numpy alone.

A *segment* is what one document has in a row: it begins where a row does, at a document's first token, or where
positions restart. `borders` are the documents' first tokens that are not the first of their row.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from peer_loaders import Rows

_GRAM = 8
"""Tokens in a run by which repeated text is found."""


class Recorder:
    """Collects the rows of one rank."""

    def __init__(self) -> None:
        self.keys: dict[str, str] = {}
        self._tokens: list[np.ndarray] = []
        self._positions: list[np.ndarray] = []
        self._rows: list[int] = []

    def add(self, rows: "Rows") -> None:
        """Adds a micro-batch."""
        self.keys = self.keys or rows.keys
        self._tokens += [row.astype(np.int32) for row in rows.tokens]
        self._positions += [row.astype(np.int32) for row in rows.positions or []]
        self._rows.append(len(rows.tokens))

    def save(self, path: Path) -> None:
        empty = np.empty(0, dtype=np.int32)
        np.savez(
            path,
            tokens=np.concatenate([empty, *self._tokens]),
            positions=np.concatenate([empty, *self._positions]),
            row_slots=np.array([len(row) for row in self._tokens], dtype=np.int64),
            rows=np.array(self._rows, dtype=np.int64),
        )


@dataclass(frozen=True, kw_only=True)
class Record:
    """What one rank read: K micro-batches of N rows with T slots altogether."""

    tokens: np.ndarray
    positions: np.ndarray | None
    row_slots: np.ndarray
    rows: np.ndarray
    """Rows of each micro-batch."""
    micro_batches: int
    """Of a step."""
    begin: int
    padding: int

    @classmethod
    def read(cls, path: Path, *, micro_batches: int, begin: int, padding: int) -> "Record":
        with np.load(path) as found:
            arrays = {name: found[name] for name in found.files}
        positions = arrays["positions"]
        if len(positions) not in (0, len(arrays["tokens"])):
            raise ValueError(f"{path}: {len(positions)} positions for {len(arrays['tokens'])} slots")
        return cls(
            tokens=arrays["tokens"].astype(np.int64),
            positions=positions if len(positions) else None,
            row_slots=arrays["row_slots"],
            rows=arrays["rows"],
            micro_batches=micro_batches,
            begin=begin,
            padding=padding,
        )

    @property
    def steps(self) -> int:
        return -(-len(self.rows) // self.micro_batches)

    @property
    def row_starts(self) -> np.ndarray:
        return np.cumsum(self.row_slots) - self.row_slots

    @property
    def is_real(self) -> np.ndarray:
        """Whether each slot holds a token of a document."""
        return self.tokens != self.padding

    @property
    def visible_starts(self) -> np.ndarray:
        """Where a model finds that a sequence begins: at the start of a row, and where positions restart."""
        starts = np.zeros(len(self.tokens), dtype=bool)
        starts[self.row_starts] = True
        return starts if self.positions is None else starts | (self.positions == 0)

    @property
    def segment_starts(self) -> np.ndarray:
        return self.visible_starts | (self.tokens == self.begin)

    @property
    def step_of_slots(self) -> np.ndarray:
        """The step of each slot, counted from the first one that was read."""
        steps = np.arange(len(self.rows)) // self.micro_batches
        return np.repeat(np.repeat(steps, self.rows), self.row_slots)

    def slots_of_micro_batches(self) -> np.ndarray:
        ends = np.concatenate([[0], np.cumsum(self.row_slots)])[np.cumsum(self.rows)]
        return np.diff(ends, prepend=0)

    @cached_property
    def grams(self) -> np.ndarray:
        """Hashes of all runs of `_GRAM` tokens within a segment."""
        return _grams(self.tokens, self.segment_starts)

    @cached_property
    def counted_grams(self) -> tuple[np.ndarray, np.ndarray]:
        """The different ones in order, and how often each comes."""
        values, counts = np.unique(self.grams, return_counts=True)
        return values, counts

    def borders_shown(self) -> float | None:
        """Returns the share of borders at which positions restart; None without any border."""
        starts = np.zeros(len(self.tokens), dtype=bool)
        starts[self.row_starts] = True
        borders = (self.tokens == self.begin) & ~starts
        return float(self.visible_starts[borders].mean()) if borders.any() else None

    def text_of_steps(self) -> list[Counter[int]]:
        """Returns the segments of each step as hashes, without padding, how often each."""
        hashes, steps = _segment_hashes(self)
        found: list[Counter[int]] = [Counter() for _ in range(self.steps)]
        for segment, step in zip(hashes.tolist(), steps.tolist(), strict=True):
            found[step][segment] += 1
        return found

    def loads_of_steps(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens of each step, and the sum of squared lengths of what attends to itself in it."""
        tokens = np.bincount(self.step_of_slots, weights=self.is_real, minlength=self.steps)
        starts = np.flatnonzero(self.visible_starts)
        lengths = np.diff(starts, append=len(self.tokens))
        real = self.is_real[starts]
        squares = np.bincount(
            self.step_of_slots[starts], weights=real * lengths.astype(float) ** 2, minlength=self.steps
        )
        return tokens, squares

    def part(self, step: int, stop: int | None) -> "Record":
        """Returns the steps from `step` to `stop`, or to the end."""
        chosen = slice(step * self.micro_batches, None if stop is None else stop * self.micro_batches)
        row_ends = np.concatenate([[0], np.cumsum(self.rows)])
        slot_ends = np.concatenate([[0], np.cumsum(self.row_slots)])
        first, last = (int(row_ends[edge]) for edge in chosen.indices(len(self.rows))[:2])
        slots = slice(int(slot_ends[first]), int(slot_ends[last]))
        return replace(
            self,
            tokens=self.tokens[slots],
            positions=None if self.positions is None else self.positions[slots],
            row_slots=self.row_slots[first:last],
            rows=self.rows[chosen],
        )

    def equals(self, other: "Record") -> bool:
        """Whether all micro-batches are the same, token for token."""
        return all(
            np.array_equal(mine, theirs)
            for mine, theirs in (
                (self.tokens, other.tokens),
                (self.row_slots, other.row_slots),
                (self.rows, other.rows),
            )
        )


def _segment_hashes(record: Record) -> tuple[np.ndarray, np.ndarray]:
    """Returns a hash and the step of each segment that is not padding."""
    starts = np.flatnonzero(record.segment_starts)
    starts = starts[record.is_real[starts]]
    own = record.segment_starts.cumsum() - 1
    first = np.flatnonzero(record.segment_starts)
    place = (np.arange(len(record.tokens)) - first[own]).astype(np.uint64)
    mixed = _mix(record.tokens.astype(np.uint64) + (place << np.uint64(32))) * record.is_real
    sums = np.add.reduceat(mixed, first)
    return sums[record.is_real[first]], record.step_of_slots[starts]


def _mix(values: np.ndarray) -> np.ndarray:
    """Returns well-mixed 64-bit numbers (the finaliser of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _grams(tokens: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Returns a hash of each run of `_GRAM` tokens within a segment."""
    if len(tokens) < _GRAM:
        return np.empty(0, dtype=np.uint64)
    hashes = np.zeros(len(tokens) - _GRAM + 1, dtype=np.uint64)
    for place in range(_GRAM):
        hashes = _mix(hashes ^ tokens[place : place + len(hashes)].astype(np.uint64))
    segment = starts.cumsum()
    return hashes[segment[: len(hashes)] == segment[_GRAM - 1 :]]


def coverage(records: Sequence[Record], documents: Record, end: int) -> dict[str, float]:
    """Returns which shares of the text's tokens were read, and read again, in one epoch over all ranks.

    The tokens that begin and end documents do not count, because not every loader gives them to the model. Text is
    repeated where a run of eight tokens comes more often than in the documents; the first seven of a repeated segment
    are not found in this way.
    """
    text = _text(documents, end)
    read = sum(_text(record, end) for record in records)
    expected, counts = documents.counted_grams
    found, times = np.unique(np.concatenate([record.grams for record in records]), return_counts=True)
    place = np.searchsorted(expected, found).clip(max=len(expected) - 1)
    known = expected[place] == found
    repeated = int(np.maximum(times - np.where(known, counts[place], 0), 0)[known].sum())
    return {"read": (read - repeated) / text, "repeated": repeated / text}


def _text(record: Record, end: int) -> int:
    return int((record.is_real & (record.tokens != record.begin) & (record.tokens != end)).sum())


def steps_of_ranks(records: Sequence[Record]) -> list[Counter[int]]:
    """Returns the segments of each step over all ranks."""
    steps: list[Counter[int]] = [Counter() for _ in range(max(record.steps for record in records))]
    for record in records:
        for step, found in enumerate(record.text_of_steps()):
            steps[step] += found
    return steps


def shared_steps(first: Sequence[Counter[int]], second: Sequence[Counter[int]]) -> float:
    """Returns the share of steps that hold the same segments in both, of the longer one."""
    same = sum(one == other for one, other in zip(first, second, strict=False))
    return same / max(len(first), len(second), 1)


def balance(records: Sequence[Record]) -> dict[str, float]:
    """Returns the mean over steps of the greatest rank's load over the mean rank's, but for the last step."""
    loads = [record.loads_of_steps() for record in records]
    whole = min(len(tokens) for tokens, _ in loads) - 1
    found = {}
    for name, values in zip(("tokens", "squared_lengths"), zip(*loads, strict=True), strict=True):
        by_rank = np.array([one[:whole] for one in values])
        found[name] = float((by_rank.max(axis=0) / by_rank.mean(axis=0)).mean())
    return found


def fill(records: Sequence[Record]) -> dict[str, float]:
    """Returns real tokens over slots, and how much larger the largest micro-batch is than the mean one."""
    slots = np.concatenate([record.slots_of_micro_batches()[:-1] for record in records])
    real = sum(int(record.is_real.sum()) for record in records)
    return {
        "real_over_slots": real / sum(len(record.tokens) for record in records),
        "largest_over_mean_micro_batch": float(slots.max() / slots.mean()),
    }
