"""A figure names a winner only where the spreads of measurements do not overlap."""

import pytest

from evenpack.studies.throughput.measure import Quartiles, clear_winner


def spread(low: int, median: int, high: int) -> Quartiles:
    return Quartiles(median=float(median), quartile_1=float(low), quartile_3=float(high))


@pytest.mark.parametrize(
    ("spreads", "winner"),
    [
        ([spread(9, 10, 11), spread(5, 6, 8)], 0),
        ([spread(5, 6, 8), spread(9, 10, 11), spread(1, 2, 3)], 1),
        ([spread(409, 413, 415), spread(405, 410, 414)], None),
        ([spread(9, 10, 11), spread(1, 2, 9)], None),
        ([spread(9, 10, 11)], None),
    ],
)
def test_a_winner_is_apart_from_all_others(spreads: list[Quartiles], winner: int | None) -> None:
    assert clear_winner(spreads) == winner
