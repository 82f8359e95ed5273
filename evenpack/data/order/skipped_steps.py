"""Steps that a run skips: their packs count as drawn, and nothing is learned from them."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SkippedSteps:
    """A set of steps, numbered from 1 as in metrics.jsonl."""

    spans: tuple[tuple[int, int], ...]
    """First and last step of each range, ascending; no two touch."""

    @classmethod
    def of(cls, entries: Iterable[int | tuple[int, int]]) -> "SkippedSteps":
        """Makes the set from single steps and (first, last), in any order; they may overlap."""
        spans: list[tuple[int, int]] = []
        for first, last in sorted((entry, entry) if isinstance(entry, int) else entry for entry in entries):
            if spans and first <= spans[-1][1] + 1:
                spans[-1] = (spans[-1][0], max(spans[-1][1], last))
            else:
                spans.append((first, last))
        return cls(spans=tuple(spans))

    def __contains__(self, step: int) -> bool:
        place = bisect_right(self.spans, step, key=lambda span: span[0]) - 1
        return place >= 0 and step <= self.spans[place][1]

    def __bool__(self) -> bool:
        return bool(self.spans)

    def __str__(self) -> str:
        return ", ".join(f"{first}" if first == last else f"{first} to {last}" for first, last in self.spans) or "none"

    def up_to(self, step: int) -> "SkippedSteps":
        """Returns the skipped steps up to and including `step`."""
        return SkippedSteps(spans=tuple((first, min(last, step)) for first, last in self.spans if first <= step))

    def without(self, other: "SkippedSteps") -> "SkippedSteps":
        """Returns the skipped steps that the other set does not have."""
        return SkippedSteps.of(span for first, last in self.spans for span in other.gaps(first, last))

    def gaps(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Yields the ranges of steps from `first` to `last` that are not skipped, as (first, last)."""
        for begin, end in self.spans:
            if first > last or begin > last:
                break
            if end >= first:
                if begin > first:
                    yield first, begin - 1
                first = end + 1
        if first <= last:
            yield first, last


NO_STEPS = SkippedSteps(spans=())
