"""Held-out losses by kind of text: their differences, verdicts and figure."""

from pathlib import Path

import numpy as np
import pytest
from seen_figures import DrawnFigure

from evenpack.studies.shuffle.config import ShuffleSection, ShuffleStudyConfig
from evenpack.studies.shuffle.held_out import HeldOutRow, compare_held_out
from evenpack.studies.shuffle.study import plot_shuffle

SECTION = ShuffleSection(reference="permutation", held_out={"wiki": None, "code": None}, effect=0.05)
PERMUTATION = {1: 5.00, 2: 5.02, 3: 4.99}
LOSSES = {
    "wiki": {
        "permutation": PERMUTATION,
        "same": {seed: loss + 0.001 * seed for seed, loss in PERMUTATION.items()},
        "worse": {seed: loss + 0.5 + 0.001 * seed for seed, loss in PERMUTATION.items()},
        "scattered": {1: 5.10, 2: 4.90, 3: 5.05},
    },
    "code": {"permutation": PERMUTATION, "same": {1: 5.00}},
}


def rows() -> dict[tuple[str, str], HeldOutRow]:
    return {(row.kind, row.arm): row for row in compare_held_out(LOSSES, SECTION)}


def test_each_arm_is_judged_by_its_differences_from_the_reference_seed_by_seed() -> None:
    found = rows()
    assert [found["wiki", arm].verdict for arm in LOSSES["wiki"]] == [None, "no effect", "higher", "cannot tell"]
    worse = found["wiki", "worse"]
    assert worse.difference is not None
    assert worse.difference.mean == pytest.approx(0.502)
    assert worse.loss.mean == pytest.approx(np.mean(list(worse.losses.values())))
    assert found["code", "same"].verdict == "cannot tell", "a single pair has no interval"


def test_verdicts_are_corrected_for_the_comparisons_of_all_kinds() -> None:
    """A difference that is significant alone, at p = 0.009, is not among eight."""
    arm = {1: 5.10, 2: 5.15, 3: 5.13}
    alone = {"wiki": {"permutation": PERMUTATION, "arm": arm}}
    (_, row) = compare_held_out(alone, SECTION)
    assert row.difference is not None
    assert row.difference.p_value == pytest.approx(0.0094, abs=0.0001)
    assert row.verdict == "higher"
    many = {kind: {"permutation": PERMUTATION, "arm": arm} for kind in map(str, range(8))}
    assert {row.verdict for row in compare_held_out(many, SECTION)} == {None, "cannot tell"}


@pytest.mark.slow
def test_the_figure_has_a_panel_of_held_out_losses(drawn: list[DrawnFigure], tmp_path: Path) -> None:
    study = ShuffleStudyConfig.model_validate(
        {
            "study": {"name": "small", "output_dir": "runs/small"},
            "phases": {
                "training": {"base": "run.yaml", "seeds": [1, 2, 3], "arms": {arm: {} for arm in LOSSES["wiki"]}}
            },
            "shuffle": SECTION.model_dump(),
        }
    )
    losses = {arm: {seed: np.linspace(5.0, 4.0, 30) for seed in of_seed} for arm, of_seed in LOSSES["wiki"].items()}
    jumps: dict[str, dict[int, float]] = {arm: {} for arm in losses}
    plot_shuffle(losses, jumps, [], study, tmp_path / "f.png", held_out=list(rows().values()), origin="ORIGIN")
    assert drawn[0].titles == ("Loss by order of training", "Held-out loss by kind of text")
    assert "with its 90 % interval; dots: single seeds; grey: differences below 0.05" in drawn[0].footer
    assert drawn[0].collisions == ()
