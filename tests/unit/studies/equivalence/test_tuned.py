"""The comparison of arms with the reference after fine-tuning."""

import dataclasses
from pathlib import Path

import pytest
from study_files import write_tuned

from evenpack.errors import DataError
from evenpack.studies.equivalence.compare import TaskComparison, Tuned, compare_tuned, read_tuned
from evenpack.studies.equivalence.config import EquivalenceSection
from evenpack.studies.equivalence.presentation import tuned_tables

SECTION = EquivalenceSection(reference="unpacked", margin=0.1)


def tuned(*values: float) -> Tuned:
    """Returns results with seeds 0, 1, ..., an odd number of them."""
    median = sorted(values)[len(values) // 2]
    return Tuned(
        title="SST-2",
        metric="accuracy",
        values=dict(enumerate(values)),
        median=median,
        median_seed=values.index(median),
        interval=(median - 0.1, median + 0.1),
        guess=0.5,
    )


def compared(**arms: dict[int, Tuned]) -> TaskComparison:
    comparison = compare_tuned("feeling", arms, SECTION)
    assert comparison is not None
    return comparison


def test_the_results_of_a_fine_tuning_are_read_as_they_were_written(tmp_path: Path) -> None:
    write_tuned(tmp_path, {0: 0.7, 1: 0.9, 2: 0.6, 3: 0.8})
    found = read_tuned(tmp_path)
    assert found.values == {0: 0.7, 1: 0.9, 2: 0.6, 3: 0.8}
    assert (found.median, found.median_seed, found.guess) == (0.75, 0, 0.5)
    assert found.interval == pytest.approx((0.6, 0.8)), "the median seed's"
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(DataError, match=r"results\.json holds no results of this version"):
        read_tuned(tmp_path)


def test_several_pretraining_seeds_are_compared_by_their_medians() -> None:
    reference = {1: tuned(0.70, 0.80, 0.90), 2: tuned(0.60, 0.70, 0.80), 3: tuned(0.5, 0.5, 0.5)}
    found = compared(unpacked=reference, packed={1: tuned(0.10, 0.81, 0.99), 2: tuned(0.60, 0.73, 0.80)}, begun={})
    assert [arm.arm for arm in found.arms] == ["unpacked", "packed"]
    assert found.arms[0].difference is None
    assert found.arms[0].median == pytest.approx((0.8 + 0.7 + 0.5) / 3)
    packed = found.arms[1]
    assert packed.difference is not None
    assert packed.paired_by == "pretraining seed"
    assert (packed.difference.pairs, packed.difference.mean) == (2, pytest.approx(0.02))
    assert packed.difference.standard_deviation == pytest.approx(0.02 / 2**0.5), "of 0.01 and 0.03"


def test_a_single_pretraining_seed_is_compared_by_its_fine_tuning_seeds() -> None:
    found = compared(unpacked={1: tuned(0.70, 0.80, 0.90)}, packed={1: tuned(0.71, 0.82, 0.93), 2: tuned(0.1)})
    difference = found.arms[1].difference
    assert difference is not None
    assert found.arms[1].paired_by == "fine-tuning seed"
    assert (difference.pairs, difference.mean) == (3, pytest.approx(0.02))
    some = dataclasses.replace(tuned(0.1, 0.2, 0.3), values={2: 0.93, 5: 0.1, 1: 0.82})
    difference = compared(unpacked={1: tuned(0.70, 0.80, 0.90)}, packed={1: some}).arms[1].difference
    assert difference is not None
    assert (difference.pairs, difference.mean) == (2, pytest.approx(0.025)), "of the seeds that both have"


def test_without_a_finished_fine_tuning_there_is_nothing_to_compare() -> None:
    assert compare_tuned("feeling", {"unpacked": {}, "packed": {}}, SECTION) is None
    assert tuned_tables([], SECTION) == []
    assert compared(packed={1: tuned(0.7)}).arms[0].difference is None
