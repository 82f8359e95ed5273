"""Paired differences in known cases, and their verdicts."""

import math

import pytest
from scipy import stats

from evenpack.studies.statistics.paired import PairedDifference, paired_difference, verdict_of, verdicts_of_family


def test_a_known_difference() -> None:
    found = paired_difference([2.0, 4.0, 9.0], [1.0, 2.0, 6.0], significance=0.05)
    assert (found.mean, found.standard_deviation, found.pairs) == (2.0, 1.0, 3)
    reach = 2.919986 / math.sqrt(3)  # Student's t at 0.95 with two degrees of freedom, as tables have it
    assert found.low == pytest.approx(2.0 - reach, rel=1e-6)
    assert found.high == pytest.approx(2.0 + reach, rel=1e-6)


def test_comparisons_of_one_table_are_corrected_for_their_number() -> None:
    """Holm: the least of four p-values is compared with 0.05 / 4, the next with 0.05 / 3; after a failure, none."""
    values = {
        "clear": [1.0, 1.1, 0.9],
        "lost by the number": [1.0, 1.3, 0.75],
        "narrow": [0.01, -0.02, 0.0],
        "wide": [2.0, -2.0, 0.5],
    }
    differences = [paired_difference(one, [0.0] * 3, significance=0.05) for one in values.values()]
    p_values = [one.p_value for one in differences]
    assert p_values == [pytest.approx(stats.ttest_1samp(one, 0).pvalue) for one in values.values()]
    assert p_values[0] is not None
    assert p_values[1] is not None
    assert p_values[0] < 0.05 / 4 < 0.05 / 3 < p_values[1] < 0.05
    found = verdicts_of_family(differences, effects=[0.1] * 4, significance=0.05)
    assert found == ["higher", "cannot tell", "no effect", "cannot tell"]
    assert verdicts_of_family(differences[1:2], effects=[0.1], significance=0.05) == ["higher"], "alone it would be"
    opposite = [paired_difference([0.0] * 3, one, significance=0.05) for one in values.values()]
    assert verdicts_of_family(differences, effects=[0.1, 0.1, 0.01, 9.0], significance=0.05)[2:] == [
        "cannot tell",
        "no effect",
    ], "each has an effect of its own that matters"
    assert verdicts_of_family(opposite, effects=[0.1] * 4, significance=0.05)[0] == "lower"


def test_a_single_pair_and_no_scatter_have_their_own_p_values() -> None:
    assert paired_difference([1.0], [0.0], significance=0.05).p_value is None
    assert paired_difference([1.0, 1.0], [0.0, 0.0], significance=0.05).p_value == 0.0
    assert paired_difference([1.0, 1.0], [1.0, 1.0], significance=0.05).p_value == 1.0
    single = [paired_difference([1.0], [0.0], significance=0.05)]
    assert verdicts_of_family(single, effects=[9.0], significance=0.05) == ["cannot tell"]


def test_the_interval_decides_as_two_one_sided_tests_do() -> None:
    first, second = [0.31, 0.12, -0.05, 0.2, 0.11], [0.25, 0.15, 0.0, 0.12, 0.02]
    found = paired_difference(first, second, significance=0.05)
    for margin in (0.03, 0.06, 0.09, 0.12):
        above = stats.ttest_1samp(
            [a - b + margin for a, b in zip(first, second, strict=True)], 0, alternative="greater"
        )
        below = stats.ttest_1samp([a - b - margin for a, b in zip(first, second, strict=True)], 0, alternative="less")
        both = max(above.pvalue, below.pvalue) < 0.05
        assert (verdict_of(found, margin=margin, larger_is_worse=True) == "equivalent") == both
    assert verdict_of(found, margin=0.03, larger_is_worse=True) == "undecided"
    assert verdict_of(found, margin=0.12, larger_is_worse=True) == "equivalent"


@pytest.mark.parametrize(
    ("low", "high", "larger_is_worse", "verdict"),
    [
        (-0.5, 0.5, True, "equivalent"),
        (1.0, 2.0, True, "worse"),
        (1.0, 2.0, False, "better"),
        (-2.0, -1.0, True, "better"),
        (-2.0, -1.0, False, "worse"),
        (0.5, 1.5, True, "undecided"),
        (-0.5, 1.0, True, "undecided"),
        (-3.0, 3.0, True, "undecided"),
    ],
)
def test_what_an_interval_decides(low: float, high: float, larger_is_worse: bool, verdict: str) -> None:
    found = PairedDifference(mean=(low + high) / 2, standard_deviation=1.0, low=low, high=high, pairs=3)
    assert verdict_of(found, margin=1.0, larger_is_worse=larger_is_worse) == verdict


def test_one_pair_decides_nothing() -> None:
    found = paired_difference([1.0], [1.0], significance=0.05)
    assert (found.low, found.high, found.standard_deviation) == (None, None, None)
    assert verdict_of(found, margin=1.0, larger_is_worse=True) == "undecided"


def test_nothing_to_compare_is_an_error() -> None:
    with pytest.raises(ValueError, match="no pair"):
        paired_difference([], [], significance=0.05)
