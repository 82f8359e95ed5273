"""Steps that a run skips: their packs count as drawn, and nothing is learned from them."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SkippedSteps:
    """A set of steps, which are counted from 0."""

    spans: tuple[tuple[int, int], ...]
    """First step of each range and the one after its last, ascending; no two touch."""

    @classmethod
    def named(cls, entries: Iterable[int | tuple[int, int]]) -> "SkippedSteps":
        """Makes the set from the entries of a run file, single steps and (first, last), which count steps from 1.

        They may be in any order, and overlap.
        """
        spans: list[tuple[int, int]] = []
        for first, last in sorted((entry, entry) if isinstance(entry, int) else entry for entry in entries):
            if spans and first - 1 <= spans[-1][1]:
                spans[-1] = (spans[-1][0], max(spans[-1][1], last))
            else:
                spans.append((first - 1, last))
        return cls(spans=tuple(spans))

    def __contains__(self, step: int) -> bool:
        place = bisect_right(self.spans, step, key=lambda span: span[0]) - 1
        return place >= 0 and step < self.spans[place][1]

    def __bool__(self) -> bool:
        return bool(self.spans)

    def __str__(self) -> str:
        """Returns the steps as a run file names them."""
        named = ((start + 1, stop) for start, stop in self.spans)
        return ", ".join(f"{first}" if first == last else f"{first} to {last}" for first, last in named) or "none"

    def before(self, stop: int) -> "SkippedSteps":
        """Returns the skipped steps before `stop`."""
        return SkippedSteps(spans=tuple((start, min(end, stop)) for start, end in self.spans if start < stop))

    def without(self, other: "SkippedSteps") -> "SkippedSteps":
        """Returns the skipped steps that the other set does not have."""
        return SkippedSteps(spans=tuple(gap for start, stop in self.spans for gap in other.gaps(start, stop)))

    def gaps(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yields the ranges of steps from `start` up to `stop` that are not skipped, each as (start, stop)."""
        for begin, end in self.spans:
            if start >= stop or begin >= stop:
                break
            if end > start:
                if begin > start:
                    yield start, begin
                start = end
        if start < stop:
            yield start, stop


NO_STEPS = SkippedSteps(spans=())
