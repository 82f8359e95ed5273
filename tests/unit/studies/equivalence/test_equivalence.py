"""Curves from logs, the comparison of arms with the reference, and the figure."""

import dataclasses
import json
from pathlib import Path

import pytest
from study_files import write_log, write_study

from evenpack.errors import ConfigError, DataError
from evenpack.studies.equivalence.compare import Curve, compare, read_curve
from evenpack.studies.equivalence.config import EquivalenceConfig, EquivalenceSection
from evenpack.studies.equivalence.presentation import comparison_tables, plot_equivalence
from evenpack.studies.runs.study_file import load_study

SECTION = EquivalenceSection(reference="unpacked", margin=0.1, controls=["broken"])


def curve(*losses: float, slots: float = 100.0) -> Curve:
    """Returns a curve with an evaluation every ten samples."""
    return Curve(
        samples=tuple(10 * (index + 1) for index in range(len(losses))),
        loss=losses,
        accuracy=tuple(1.0 / loss for loss in losses),
        next_sentence_accuracy=None,
        training_loss=losses[-1],
        sequences_per_step=10.0,
        slots_per_sequence=slots,
        host_to_device_bytes_per_sequence=800.0,
    )


def test_a_curve_counts_samples(tmp_path: Path) -> None:
    write_log(tmp_path, losses=[5.0, 4.0, 3.0, 2.0], sequences=10)
    found = read_curve(tmp_path)
    assert found.samples == (20, 40)
    assert (found.loss, found.accuracy) == ((4.0, 2.0), (0.25, 0.5))
    assert found.next_sentence_accuracy is None
    assert (found.training_loss, found.sequences_per_step, found.slots_per_sequence) == (2.0, 10.0, 32.0)
    assert found.host_to_device_bytes_per_sequence == 100.0


def test_the_end_of_training_is_its_last_tenth(tmp_path: Path) -> None:
    write_log(tmp_path, losses=[9.0] * 18 + [3.0, 5.0])
    log = tmp_path / "metrics.jsonl"
    records = [json.loads(line) for line in log.read_text().splitlines()]
    for record in records:
        record |= {"targets": 3 if record["step"] == 19 else 1}
    log.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert read_curve(tmp_path).training_loss == 3.5


def test_a_log_that_samples_cannot_be_counted_from_is_refused(tmp_path: Path) -> None:
    write_log(tmp_path, losses=[5.0, 4.0, 3.0, 2.0])
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join(lines[1:]))
    with pytest.raises(DataError, match="does not have each step once"):
        read_curve(tmp_path)
    write_log(tmp_path, losses=[5.0])
    with pytest.raises(DataError, match="has no evaluation"):
        read_curve(tmp_path)


def test_a_target_is_reached_between_two_evaluations() -> None:
    found = curve(4.0, 2.0, 1.0)
    assert found.reaches(3.0, "loss") == 15.0
    assert found.reaches(4.5, "loss") == 10.0
    assert found.reaches(0.5, "loss") is None
    assert found.reaches(0.75, "accuracy") == 25.0


def test_arms_are_compared_seed_by_seed() -> None:
    curves = {
        "unpacked": {1: curve(5.0, 2.0), 2: curve(5.0, 3.0), 3: curve(5.0, 4.0)},
        "packed": {1: curve(5.0, 2.01), 2: curve(5.0, 3.02), 3: curve(5.0, 4.03)},
        "broken": {1: curve(5.0, 2.5), 2: curve(5.0, 3.6), 3: curve(5.0, 4.55)},
        "noisy": {1: curve(5.0, 2.3), 2: curve(5.0, 2.8), 3: curve(5.0, 4.0)},
        "begun": {3: curve(5.0, 4.0)},
        "not begun": {},
    }
    rows = {row.arm: row for row in compare(curves, SECTION).rows}
    assert list(rows) == ["unpacked", "packed", "broken", "noisy", "begun"]
    difference = rows["packed"].difference
    assert difference is not None
    assert difference.mean == pytest.approx(0.02)
    assert difference.standard_deviation == pytest.approx(0.01), "of the differences, and not of the arms"
    assert rows["unpacked"].loss.deviation == pytest.approx(1.0)
    assert {arm: row.verdict for arm, row in rows.items()} == {
        "unpacked": None,
        "packed": "equivalent",
        "broken": "worse",
        "noisy": "undecided",
        "begun": "undecided",
    }


@pytest.mark.parametrize(
    ("controls", "passed"),
    [
        (["broken"], ()),
        ([], ()),
        (["broken", "stopped"], ("stopped",)),
        (["broken", "noisy"], ("noisy",)),
        (["broken", "not begun"], ("not begun",)),
    ],
)
def test_equivalence_needs_controls_that_the_margin_tells_apart(controls: list[str], passed: tuple[str, ...]) -> None:
    curves = {
        "unpacked": {1: curve(2.0), 2: curve(3.0), 3: curve(4.0)},
        "packed": {1: curve(2.01), 2: curve(3.02), 3: curve(4.03)},
        "broken": {1: curve(2.5), 2: curve(3.6), 3: curve(4.55)},
        "stopped": {1: curve(2.03), 2: curve(3.04), 3: curve(4.05)},
        "noisy": {1: curve(2.3), 2: curve(2.8), 3: curve(4.0)},
        "not begun": {},
    }
    section = EquivalenceSection(reference="unpacked", margin=0.1, controls=controls)
    comparison = compare(curves, section)
    verdicts = {row.arm: row.verdict for row in comparison.rows}
    assert comparison.passed_controls == passed
    assert verdicts["packed"] == ("equivalent" if controls == ["broken"] else "no verdict")
    assert (verdicts["broken"], verdicts["noisy"]) == ("worse", "undecided"), "what is beyond the margin stays so"
    assert comparison_tables(comparison, section)


def test_controls_are_arms_other_than_the_reference(tmp_path: Path) -> None:
    for control, message in (("none", "expected an arm of the last phase"), ("unpacked", "is the reference")):
        with pytest.raises(ConfigError, match=message):
            load_study(write_study(tmp_path), EquivalenceConfig, [f"equivalence.controls=[{control}]"])


def test_accuracy_is_worse_where_it_is_lower() -> None:
    section = EquivalenceSection(reference="unpacked", margin=0.01, measure="accuracy")
    curves = {
        "unpacked": {1: curve(2.0), 2: curve(2.0)},
        "worse": {1: curve(4.0), 2: curve(4.001)},
    }
    assert compare(curves, section).rows[1].verdict == "worse"


def test_samples_and_slots_are_ratios_of_pairs() -> None:
    curves = {
        "unpacked": {1: curve(4.0, 2.0, 1.0), 2: curve(4.0, 2.0, 1.0)},
        "packed": {1: curve(2.0, 1.0, 0.5, slots=50.0), 2: curve(4.0, 1.0, 0.5, slots=50.0)},
        "slow": {1: curve(4.0, 2.0, 1.1), 2: curve(4.0, 2.0, 0.9)},
    }
    comparison = compare(curves, SECTION)
    assert comparison.target == 1.0, "the worst of the reference's last"
    packed = comparison.rows[1].speed
    assert packed is not None
    assert (packed.samples_to_target, packed.samples_ratio, packed.slots_ratio) == (20.0, 1.5, 2.0)
    uneven = {"unpacked": {1: curve(4.0, 1.0), 2: curve(4.0, 0.8)}}
    by_accuracy = EquivalenceSection(reference="unpacked", margin=0.01, measure="accuracy")
    assert (compare(uneven, SECTION).target, compare(uneven, by_accuracy).target) == (1.0, 1.0), "each seed reaches it"
    slow = comparison.rows[2].speed
    assert slow is not None
    assert (slow.samples_to_target, slow.samples_ratio) == (None, None), "one seed has not got there"


@pytest.mark.slow
def test_a_figure_is_drawn_of_any_number_of_arms_and_seeds(tmp_path: Path) -> None:
    study, _ = load_study(write_study(tmp_path), EquivalenceConfig, ())
    curves = {
        "unpacked": {1: curve(3.0, 2.0, 1.0), 2: curve(3.0, 2.0, 1.1)},
        **{f"arm_{n}": {1: curve(3.0, 2.0, 1.0 + n / 100)} for n in range(8)},
        "not begun": {},
    }
    comparison = compare(curves, study.equivalence)
    assert len(comparison.rows) == 9
    path = tmp_path / "figure.png"
    once = {arm: {1: dataclasses.replace(curve(2.0), samples=(10,))} for arm in ("unpacked", "packed")}
    for found, compared in ((curves, comparison), (once, compare(once, study.equivalence))):
        plot_equivalence(found, compared, study, path, origin="ORIGIN")
        assert path.read_bytes().startswith(b"\x89PNG")
