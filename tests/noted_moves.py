"""What this process says that it does."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from evenpack.engine.activity import Activity, doing


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
