"""What a rank does without the others."""

from collections.abc import Iterator
from contextlib import contextmanager

from evenpack.engine.activity import (
    current_own_work,
    each_as_own_work,
    entered_as_own_work,
    own_work,
)


def test_own_work_is_the_innermost_and_ends_with_its_block() -> None:
    assert current_own_work() is None
    with own_work("outer"):
        with own_work():
            assert current_own_work() == ""
        assert current_own_work() == "outer"
    assert current_own_work() is None


def test_making_items_and_entering_and_leaving_contexts_are_own_work() -> None:
    during: list[str | None] = []

    @contextmanager
    def opened() -> Iterator[Iterator[int]]:
        during.append(current_own_work())
        yield items()
        during.append(current_own_work())

    def items() -> Iterator[int]:
        for item in (0, 1):
            during.append(current_own_work())
            yield item

    with entered_as_own_work(opened()) as source:
        assert current_own_work() is None
        for _ in each_as_own_work(source):
            assert current_own_work() is None
    assert current_own_work() is None
    assert during == [""] * 4
