"""What a title may claim: an interval that is below all others."""

import pytest

from evenpack.studies.statistics.winners import clearly_lowest


@pytest.mark.parametrize(
    ("intervals", "lowest"),
    [
        ([(3.0, 4.0), (1.0, 2.0), (2.5, 9.0)], 1),
        ([(1.0, 2.0), (2.1, 3.0)], 0),
        ([(1.0, 2.0), (2.0, 3.0)], None),
        ([(1.0, 5.0), (2.0, 3.0)], None),
        ([(1.0, 2.0), (1.0, 2.0)], None),
        ([(1.0, 2.0)], None),
        ([], None),
    ],
)
def test_the_lowest_interval_touches_no_other(intervals: list[tuple[float, float]], lowest: int | None) -> None:
    assert clearly_lowest(intervals) == lowest
