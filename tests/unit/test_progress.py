"""How far long work is, as people read it."""

import math

import pytest

from evenpack.progress import format_duration, format_rate


@pytest.mark.parametrize(
    ("per_second", "text"),
    [
        (None, "-"),
        (math.inf, "-"),
        (0.0, "0"),
        (812.4, "812"),
        (999.6, "1.00k"),
        (9_996.0, "10.0k"),
        (45_300.0, "45.3k"),
        (99_960.0, "100k"),
        (1_204_000.0, "1.20M"),
        (3.1e12, "3100G"),
    ],
)
def test_rates_have_three_digits_and_a_unit(per_second: float | None, text: str):
    assert format_rate(per_second) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0.4, "0s"),
        (59.4, "59s"),
        (59.6, "1m00s"),
        (3599.7, "1h00m"),
        (11_100.0, "3h05m"),
        (187_300.0, "2d04h"),
    ],
)
def test_durations_have_two_units(seconds: float | None, text: str):
    assert format_duration(seconds) == text
