"""A study file is expanded to runs: their number and starting points, and errors."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from study_files import STEPS, write_study

from evenpack.config import load_run_file
from evenpack.engine.config import RunConfig
from evenpack.errors import ConfigError
from evenpack.studies.equivalence.config import EquivalenceConfig
from evenpack.studies.runs.jobs import StudyRun, expand
from evenpack.studies.runs.study_file import load_study


def runs_of(path: Path, *overrides: str) -> dict[str, StudyRun]:
    study, run_overrides = load_study(path, EquivalenceConfig, overrides)
    return {run.key: run for run in expand(study, run_overrides)}


def phases(folder: Path) -> dict[str, Any]:
    """Returns the phases of the file that `write_study` writes, for changes."""
    values: dict[str, Any] = yaml.safe_load(write_study(folder).read_text())["phases"]
    return values


def test_a_study_becomes_runs_phase_by_phase_and_seed_by_seed(tmp_path: Path) -> None:
    runs = runs_of(write_study(tmp_path))
    assert list(runs) == [
        "first/unpacked/seed_7",
        "second/unpacked/seed_1",
        "second/packed/seed_1",
        "second/unpacked/seed_2",
        "second/packed/seed_2",
    ]
    run = runs["second/packed/seed_2"]
    assert run.config.run.seed == 2
    assert run.config.run.name == "small/second/packed/seed_2"
    assert run.output_dir == tmp_path / "study/second/packed/seed_2"
    assert (run.config.training.layout, run.config.training.steps) == ("packed", STEPS)
    assert runs["second/unpacked/seed_2"].config.training.layout == "padded"
    assert runs["first/unpacked/seed_7"].config.training.steps != STEPS


def test_the_overrides_of_a_run_reproduce_it_from_the_run_file(tmp_path: Path) -> None:
    for run in runs_of(write_study(tmp_path)).values():
        assert load_run_file(run.run_file, RunConfig, run.overrides) == run.config


def test_a_run_starts_from_its_own_arm_and_seed_or_else_from_the_first(tmp_path: Path) -> None:
    values = phases(tmp_path)
    values["first"] |= {"seeds": [7, 2], "arms": {"plain": {}, "packed": {}}}
    runs = runs_of(write_study(tmp_path, phases=values))
    starts = {key: run.starts_from for key, run in runs.items() if run.phase == "second"}
    assert starts == {
        "second/unpacked/seed_1": "first/plain/seed_7",
        "second/packed/seed_1": "first/packed/seed_7",
        "second/unpacked/seed_2": "first/plain/seed_2",
        "second/packed/seed_2": "first/packed/seed_2",
    }
    run = runs["second/packed/seed_2"]
    assert run.config.training.initialize_from == runs["first/packed/seed_2"].output_dir


def test_runs_share_prepared_data_if_it_would_be_the_same(tmp_path: Path) -> None:
    """All share the tokens of their corpus."""
    values = phases(tmp_path)
    values["second"]["arms"]["short"] = {"data.recipe.max_sequence_length": 16}
    runs = runs_of(write_study(tmp_path, phases=values))
    places = {key: run.config.prepared_dir for key, run in runs.items()}
    assert len(set(places.values())) == 2
    assert places["second/packed/seed_1"] == places["first/unpacked/seed_7"] != places["second/short/seed_1"]
    assert all(place.is_relative_to(tmp_path / "study/data") for place in places.values())
    assert {run.config.data.tokens_dir for run in runs.values()} == {tmp_path / "study/data/tokens"}
    own = runs_of(write_study(tmp_path, phases=values), f"data.tokens_dir={tmp_path}/elsewhere")
    assert {run.config.data.tokens_dir for run in own.values()} == {tmp_path / "elsewhere"}
    assert {run.prepared_dir for run in own.values()} == {run.prepared_dir for run in runs.values()}


def test_overrides_change_the_study_or_all_of_its_runs(tmp_path: Path) -> None:
    overrides = (f"study.output_dir={tmp_path}/other", "phases.second.seeds=[5]", "training.steps=9")
    runs = runs_of(write_study(tmp_path), *overrides)
    assert [run.seed for run in runs.values()] == [7, 5, 5]
    assert {run.config.training.steps for run in runs.values()} == {9}
    assert all(run.output_dir.is_relative_to(tmp_path / "other") for run in runs.values())


def test_a_word_that_would_undo_an_arm_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"arm unpacked of phase first sets training\.layout itself"):
        runs_of(write_study(tmp_path), "training.layout=packed")


@pytest.mark.parametrize("key", ["run.seed", "run.output_dir"])
def test_what_a_study_sets_itself_is_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} is set by the study itself"):
        runs_of(write_study(tmp_path), f"{key}=1")
    values = phases(tmp_path)
    values["second"]["arms"]["packed"] = {key: 1}
    with pytest.raises(ConfigError, match=f"{key} is set by the study itself"):
        runs_of(write_study(tmp_path, phases=values))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seeds": [1, 1]}, "phases.second.seeds: expected seeds that differ"),
        ({"arms": {"../up": {}}}, "phases.second.arms"),
        ({"arms": {"unpacked": {}, "odd": {"training.layot": "padded"}}}, "second/odd/seed_1.*did you mean 'layout'"),
        ({"starts_from": "second"}, r"expected an earlier phase \(first\), found 'second'"),
        ({"base": "missing.yaml"}, "missing.yaml does not exist"),
    ],
)
def test_what_makes_no_sound_run_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    values = phases(tmp_path)
    values["second"] |= change
    with pytest.raises(ConfigError, match=message):
        runs_of(write_study(tmp_path, phases=values))


def test_the_reference_must_be_an_arm(tmp_path: Path) -> None:
    path = write_study(tmp_path, equivalence={"reference": "padded", "margin": 0.1})
    with pytest.raises(ConfigError, match=r"expected an arm of the last phase, second \(unpacked, packed\)"):
        runs_of(path)


def test_the_order_of_rows_varies_with_the_seed_where_the_phase_says_so(tmp_path: Path) -> None:
    """An arm that states its order keeps it, and recipes without atoms have no order of rows."""
    values = phases(tmp_path)
    atoms = {"data.recipe": {"kind": "concat", "max_sequence_length": 64, "atom": 32}, "data.pack_length": 64}
    values["second"] |= {
        "draws_rows_by_seed": True,
        "arms": {
            "atoms": atoms,
            "fixed": atoms | {"data.recipe.seed": 42},
            "whole": {**atoms, "data.recipe": {**atoms["data.recipe"], "seed": 42}},
            "rows": {"data.recipe": {"kind": "concat", "max_sequence_length": 64}, "data.pack_length": 64},
        },
    }
    equivalence = {"reference": "atoms", "margin": 0.1}
    runs = runs_of(write_study(tmp_path, phases=values, equivalence=equivalence))
    seeds = [(run.arm, run.seed, run.config.data.recipe.seed) for run in runs.values() if run.phase == "second"]
    assert seeds == [
        (arm, seed, drawn)
        for seed in (1, 2)
        for arm, drawn in (("atoms", seed), ("fixed", 42), ("whole", 42), ("rows", None))
    ]
    folders = {key: run.prepared_dir for key, run in runs.items()}
    assert folders["second/atoms/seed_1"] != folders["second/atoms/seed_2"]
    assert folders["second/fixed/seed_1"] == folders["second/fixed/seed_2"] == folders["second/whole/seed_1"]
    values["second"]["draws_rows_by_seed"] = False
    runs = runs_of(write_study(tmp_path, phases=values, equivalence=equivalence))
    assert runs["second/atoms/seed_2"].config.data.recipe.seed == 42
