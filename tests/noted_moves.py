"""What this process says that it does."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from evenpack.engine.activity import START, Activity, doing


def begin_again() -> None:
    """Makes this process one in which no step has ended, whatever tests have done in it."""
    doing.end_black_box(START)
    doing.begin_black_box(START)


@contextmanager
def noted_moves() -> Iterator[list[tuple[Activity, int]]]:
    """Yields what the main thread begins within the block, with the step, and again for each piece that is done."""
    moves: list[tuple[Activity, int]] = []
    tick = doing.tick

    def note() -> None:
        moves.append((doing.activity, doing.step))
        tick()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doing, "tick", note)
        yield moves
