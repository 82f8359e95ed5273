"""Which of several intervals is below all others: what a title may claim."""

from collections.abc import Sequence


def clearly_lowest(intervals: Sequence[tuple[float, float]]) -> int | None:
    """Returns the index of the interval (low, high) that ends below the beginning of every other one.

    None if there is none, and for a single interval, which has nothing to be below of.
    """
    if len(intervals) < 2:
        return None
    best = min(range(len(intervals)), key=lambda index: intervals[index][1])
    others = [low for index, (low, _) in enumerate(intervals) if index != best]
    return best if intervals[best][1] < min(others) else None
