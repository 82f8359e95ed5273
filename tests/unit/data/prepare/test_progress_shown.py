"""`prepare` shows its progress."""

import io
import re

from rich.console import Console

from evenpack.data.prepare.progress import SourceProgress
from evenpack.progress import Progress


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def report(stage: SourceProgress, bytes_read: int) -> None:
    stage.report(documents=bytes_read // 1000, tokens=bytes_read // 4, bytes_read=bytes_read, bytes_resumed=0)


def test_the_rate_of_pairs_is_that_of_their_split() -> None:
    """Each split has bytes of its own, counted from 0: they are no step back from those of the split before."""
    stream, clock = io.StringIO(), Clock()
    with Progress(Console(file=stream, width=160), interval_seconds=5.0, clock=clock) as display:
        for total in (100_000_000, 10_000_000):
            pairs = SourceProgress(display, "wiki", "pairs", total)
            for bytes_read in range(0, total + 1, 1_000_000):
                report(pairs, bytes_read)
                clock.now += 1.0
    rates = re.findall(r"(\S+) bytes/s", stream.getvalue())
    assert len(rates) > 20
    assert set(rates) == {"-", "1.00M"}, "negative while a piece had the bytes of both"
