"""Ranks and differences of arms, and their tables."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from chunked_runs import arm, finished, study

from evenpack.errors import ConfigError
from evenpack.studies.chunking.compare import ArmRow, Finished, compare
from evenpack.studies.chunking.presentation import comparison_tables, plot_lengths, require_plots

ARMS = {
    "concat_64_atom_32": arm("concat_64_atom_32", atom=32),
    "concat_64_atom_64": arm("concat_64_atom_64", atom=64),
    "padding_64_atom_64": arm("padding_64_atom_64", recipe="padding", atom=64),
    "documents_64": arm("documents_64", recipe="documents"),
    "concat_32_atom_32": arm("concat_32_atom_32", length=32, atom=32),
}


def last_epoch(*quarters: float, steps: int = 400) -> list[float]:
    """Returns perplexities of a run whose last epoch consists of equal parts."""
    return [1000.0] * (steps // 2) + np.repeat(quarters, steps // 2 // len(quarters)).tolist()


def runs(*ends: Sequence[float], documents: Sequence[float] | None = None) -> dict[int, Finished]:
    """Returns runs with seeds 1, 2, ..., each with these parts of its last epoch."""
    alone = documents or [None] * len(ends)
    return {seed: finished(last_epoch(*end), documents=alone[seed - 1]) for seed, end in enumerate(ends, start=1)}


FOUND = {
    "concat_64_atom_32": runs([40.0, 40.0], [42.0, 42.0], documents=[30.0, 31.0]),
    "concat_64_atom_64": runs([20.0, 10.0], [20.0, 12.0], documents=[10.0, 12.0]),
    "padding_64_atom_64": runs([10.0, 10.0], [11.0, 11.0], documents=[9.0, 11.0]),
    "documents_64": runs([15.0, 15.0]),
    "concat_32_atom_32": runs([1.0, 1.0]),
}


DIVERGED = runs([40.0, 40.0], [42.0, np.inf], documents=[30.0, np.inf])


def rows_of(**changes: dict[int, Finished]) -> dict[str, ArmRow]:
    return {row.arm.name: row for row in compare(FOUND | changes, ARMS, study().chunking)}


def test_arms_are_ranked_among_atoms_and_among_all_of_a_length() -> None:
    rows = rows_of()
    in_recipe = {name: row.rank_in_recipe.mean for name, row in rows.items() if row.rank_in_recipe is not None}
    assert in_recipe == {"concat_64_atom_32": 2.0, "concat_64_atom_64": 1.0}, "others are alone among their atoms"
    ranks = {name: row.rank_at_length for name, row in rows.items()}
    assert ranks["concat_32_atom_32"] is None, "alone at its length"
    assert {name: rank.mean for name, rank in ranks.items() if rank is not None} == {
        "concat_64_atom_32": 4.0,
        "concat_64_atom_64": pytest.approx((3.0 + 1.5) / 2),
        "padding_64_atom_64": pytest.approx((1.0 + 1.5) / 2),
        "documents_64": pytest.approx((2.0 + 3.0) / 2),
    }, "over the one seed that all have finished; equal values share their ranks"


def test_final_values_have_a_spread_and_differences_are_of_pairs() -> None:
    rows = rows_of()
    padding = rows["padding_64_atom_64"]
    assert (padding.final.mean, padding.final.deviation) == pytest.approx((10.5, 0.5**0.5))
    own, documents = padding.last_tenth_difference, padding.documents_difference
    assert own is not None
    assert documents is not None
    assert (own.mean, own.standard_deviation) == pytest.approx((-0.5, 0.5**0.5))
    assert (documents.mean, documents.standard_deviation) == pytest.approx((-1.0, 0.0))
    assert rows["concat_64_atom_64"].last_tenth_difference is None, "the reference"
    alone = rows["documents_64"]
    assert alone.last_tenth_difference is not None
    assert alone.last_tenth_difference.pairs == 1
    assert (alone.documents, alone.documents_difference) == (None, None)
    assert (padding.steps, padding.steps_per_epoch, padding.padding_share) == (400, 200.0, 0.25)


def test_verdicts_are_those_of_the_comparisons_of_a_length_and_of_the_last_tenth() -> None:
    """A wide interval is never called no difference; the last hundredth alone decides nothing."""
    flat = [20.0] * 9
    changes = {
        "concat_64_atom_64": runs([*flat, 20.0], [*flat, 20.0], [*flat, 20.0], documents=[10.0, 10.0, 10.0]),
        "concat_64_atom_32": runs([*flat, 30.0], [*flat, 30.1], [*flat, 29.9], documents=[10.01, 10.0, 9.99]),
        "padding_64_atom_64": runs([*flat, 20.0], [*flat, 20.0], [*flat, 20.0], documents=[8.0, 13.0, 10.0]),
        "documents_64": runs([*flat, 20.0], [*flat, 20.0], [*flat, 20.0], documents=[10.0, 10.1, 10.2]),
    }
    rows = rows_of(**changes)
    assert rows["concat_64_atom_32"].last_tenth.mean == pytest.approx(30.0)
    assert {name: row.last_tenth_verdict for name, row in rows.items()} == {
        "concat_64_atom_32": "higher",
        "concat_64_atom_64": None,
        "padding_64_atom_64": "no effect",
        "documents_64": "no effect",
        "concat_32_atom_32": None,
    }
    assert {name: row.documents_verdict for name, row in rows.items() if row.documents is not None} == {
        "concat_64_atom_32": "no effect",
        "concat_64_atom_64": None,
        "padding_64_atom_64": "cannot tell",
        "documents_64": "cannot tell",
    }, "2 % of 10 matter"


def test_arms_with_a_reference_of_their_own_are_judged_by_it_in_one_family() -> None:
    ends = {"low": [10.0, 10.0, 10.0], "low_other": [10.1, 10.1, 10.1], "high": [40.0] * 3, "high_other": [40.3] * 3}
    found = {name: runs(*[[9.0]] * 3, documents=of_seed) for name, of_seed in ends.items()}
    section = study(reference="low", references={"high": "high", "high_other": "high"}).chunking
    rows = {row.arm.name: row for row in compare(found, {name: arm(name) for name in ends}, section)}
    assert [row.documents_difference is None for row in rows.values()] == [True, False, True, False]
    difference = rows["high_other"].documents_difference
    assert difference is not None
    assert difference.mean == pytest.approx(0.3)
    noisy = {1: 0.2, 2: 0.4, 3: 0.3}
    for seed, more in noisy.items():
        held_out = replace(found["high_other"][seed].held_out, documents=40.0 + more)
        found["high_other"][seed] = replace(found["high_other"][seed], held_out=held_out)
        held_out = replace(found["low_other"][seed].held_out, documents=10.0 + more)
        found["low_other"][seed] = replace(found["low_other"][seed], held_out=held_out)
    rows = {row.arm.name: row for row in compare(found, {name: arm(name) for name in ends}, section)}
    verdicts = [row.documents_verdict for row in rows.values()]
    assert verdicts == [None, "cannot tell", None, "no effect"], "2 % of 10 and of 40 matter; 0.05 / 2 is not reached"


@pytest.mark.parametrize("third", [None, math.inf], ids=["not evaluated", "diverged"])
def test_a_reference_of_a_seed_that_no_arm_is_paired_with_decides_nothing(third: float | None) -> None:
    """A difference is of pairs, and so is the mean of the reference of which it is a share."""
    ends = [9.0, 9.0]
    found = {
        "concat_64_atom_64": runs(ends, ends, ends if third is None else [9.0, third], documents=[10.0, 10.0, third]),
        "documents_64": runs([9.2, 9.2], [9.4, 9.4], documents=[10.3, 10.5]),
        "padding_64_atom_64": runs(ends, ends, documents=[10.0, 10.0]),
    }
    rows = {row.arm.name: row for row in compare(found, ARMS, study().chunking)}
    for name, verdict in {"documents_64": "cannot tell", "padding_64_atom_64": "no effect"}.items():
        difference = rows[name].documents_difference
        assert difference is not None
        assert difference.pairs == 2
        assert (rows[name].last_tenth_verdict, rows[name].documents_verdict) == (verdict, verdict)


def test_perplexity_at_steps_is_taken_where_the_shortest_run_of_the_length_has_been() -> None:
    short = {1: finished(last_epoch(15.0, 15.0, steps=200))}
    rows = rows_of(documents_64=short)
    assert [*rows["concat_64_atom_64"].at_steps] == [50, 100, 150, 200]
    assert [*rows["concat_32_atom_32"].at_steps] == [100, 200, 300, 400]
    (row,) = compare({"documents_64": short}, ARMS, study(perplexity_at_steps=[200, 300]).chunking)
    assert row.at_steps[300] is None
    assert row.at_steps[200] is not None
    assert row.at_steps[200].mean == pytest.approx(15.0)


def test_an_arm_evaluated_differently_from_training_has_no_rows_of_its_own() -> None:
    of_seed = {1: replace(run := finished([9.0] * 200), held_out=replace(run.held_out, own_rows=8.0))}
    arms = {
        "concat_64_atom_64": arm("concat_64_atom_64", atom=64),
        "best_fit": replace(arm("best_fit"), isolates=False),
    }
    first, second = compare(dict.fromkeys(arms, of_seed), arms, study().chunking)
    assert first.own_rows is not None
    assert second.own_rows is None


def test_a_seed_that_an_arm_lacks_is_left_out_of_the_ranks() -> None:
    row = rows_of(concat_64_atom_32={2: FOUND["concat_64_atom_32"][2]})["concat_64_atom_64"]
    assert (row.rank_at_length, row.seeds) == (None, (1, 2)), "no seed has been finished by all"
    assert row.rank_in_recipe is not None
    assert row.rank_in_recipe.deviation is None


@pytest.mark.slow
def test_each_length_has_a_figure_with_runs_as_far_as_they_went(tmp_path: Path) -> None:
    changes = {"concat_64_atom_32": DIVERGED}
    require_plots(tmp_path / "figures")
    paths = plot_lengths(
        FOUND | changes, list(rows_of(**changes).values()), study(), tmp_path / "figures", origin="ORIGIN"
    )
    assert [path.name for path in paths] == ["msl_32.png", "msl_64.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_a_run_that_diverged_comes_last() -> None:
    rows = rows_of(concat_64_atom_32=DIVERGED)
    row = rows["concat_64_atom_32"]
    assert (row.final.mean, row.final.deviation, row.last_tenth_difference, row.documents_difference) == (
        np.inf,
        None,
        None,
        None,
    )
    assert row.rank_in_recipe is not None
    assert row.rank_in_recipe.mean == 2.0
    assert comparison_tables(list(rows.values()), study().chunking)


def test_a_place_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--plot takes a folder"):
        require_plots(tmp_path / "figure.png")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is not a folder"):
        require_plots(tmp_path / "file")
