"""Grids become arms with names and settings; arms that could not be compared are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from repository import CONFIGS
from run_files import run_values, write_run_file

from evenpack.errors import ConfigError
from evenpack.models.build import Model, new_model
from evenpack.studies.chunking.compare import Arm, describe_arms
from evenpack.studies.chunking.config import ChunkingConfig, GridSection
from evenpack.studies.chunking.curves import held_out_evaluations
from evenpack.studies.chunking.study import ChunkingStudy
from evenpack.studies.runs.jobs import StudyRun, expand
from evenpack.studies.runs.study_file import load_study

CONCAT = {"data.recipe": {"kind": "concat", "isolate_documents": False}}
DOCUMENTS = {"data.recipe": {"kind": "documents"}}
SHORT = {"max_sequence_length": 16, "rows_per_step": 8, "atoms": [8, 16, 64]}
LONG = {"max_sequence_length": 32, "rows_per_step": 4, "atoms": [32], "settings": {"training.packs_per_micro_batch": 1}}
GRID = {"lengths": [SHORT, LONG], "recipes": {"concat": CONCAT}, "recipes_without_atoms": {"documents": DOCUMENTS}}


def write(folder: Path, *, arms: Any = None, training: Any = None, model: Any = None, **chunking: Any) -> Path:
    values = run_values(
        "gpt2",
        folder,
        data={"prepared_dir": None},
        model={"positions": "alibi"} | (model or {}),
        training={"steps": None, "epochs": 2} | (training or {}),
    )
    write_run_file(folder / "base.yaml", values)
    study = {
        "study": {"name": "small", "output_dir": str(folder / "study")},
        "phases": {"training": {"base": "base.yaml", "seeds": [1, 2], "arms": arms or {}}},
        "chunking": chunking,
    }
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(study, sort_keys=False), encoding="utf-8")
    return path


def load(path: Path) -> tuple[ChunkingConfig, tuple[StudyRun, ...]]:
    study, overrides = load_study(path, ChunkingConfig, ())
    return study, expand(study, overrides)


def described(path: Path) -> dict[str, Arm]:
    study, runs = load(path)
    return describe_arms(study.chunking, runs)


def test_a_grid_stands_for_an_arm_with_each_atom_at_each_length() -> None:
    arms = GridSection.model_validate(GRID).arms
    assert [(arm.name, arm.recipe) for arm in arms] == [
        ("concat_16_atom_8", "concat"),
        ("concat_16_atom_16", "concat"),
        ("concat_16_atom_64", "concat"),
        ("documents_16", "documents"),
        ("concat_32_atom_32", "concat"),
        ("documents_32", "documents"),
    ]
    assert arms[4].settings == {
        **CONCAT,
        "data.recipe.max_sequence_length": 32,
        "data.recipe.atom": 32,
        "data.pack_length": 32,
        "training.packs_per_step": 4,
        "training.packs_per_micro_batch": 1,
    }
    assert "data.recipe.atom" not in arms[5].settings


def test_a_length_may_replace_a_section_but_not_what_the_grid_sets_in_it() -> None:
    long = LONG | {"settings": {"data.recipe": {"kind": "padding"}}}
    grid = GridSection.model_validate(GRID | {"lengths": [long], "recipes": {"any": {"training.seed": 1}}})
    keys = list(grid.arms[0].settings)
    assert keys.index("data.recipe") < keys.index("data.recipe.max_sequence_length") < keys.index("data.recipe.atom")


def test_arms_of_a_grid_become_runs_before_those_of_the_phase(tmp_path: Path) -> None:
    study, runs = load(write(tmp_path, grid=GRID, arms={"own": {"data.recipe.max_sequence_length": 32}}))
    assert [run.arm for run in runs] == [*(arm.name for arm in GridSection.model_validate(GRID).arms), "own"] * 2
    arms = describe_arms(study.chunking, runs)
    assert (arms["concat_16_atom_64"].recipe, arms["concat_16_atom_64"].atom_label) == ("concat", "4 MSL")
    assert (arms["own"].recipe, arms["own"].max_sequence_length, arms["own"].atom) == ("own", 32, None)
    natural = ["concat_16_atom_16", "documents_16", "concat_32_atom_32", "documents_32", "own"]
    assert [arm.name for arm in arms.values() if arm.is_natural] == natural


@pytest.mark.parametrize("atom", [3, 12, 24])
def test_an_atom_that_neither_divides_nor_is_a_multiple_is_refused_with_what_works(tmp_path: Path, atom: int) -> None:
    path = write(tmp_path, grid=GRID | {"lengths": [SHORT | {"atoms": [16, atom]}]})
    with pytest.raises(
        ConfigError, match=rf"lengths.*atom \({atom}\) is neither .* give 1, 2, 4, 8, or a multiple of 16"
    ):
        load(path)


@pytest.mark.parametrize(
    ("grid", "arms", "message"),
    [
        ({"lengths": [SHORT | {"atoms": [16, 8, 16]}]}, {}, "atoms: two runs would have the same name: .* 16, 8, 16"),
        ({"lengths": [SHORT, SHORT]}, {}, "lengths: two runs would have the same name: .* 16, 16"),
        ({"recipes_without_atoms": {"concat_16_atom": CONCAT}}, {"concat_16_atom_8": {}}, "name, concat_16_atom_8"),
        ({"recipes": {"concat": {"data.recipe": {"atom": 8}}}}, {}, "concat: data.recipe.atom is set by the grid"),
        ({"lengths": [SHORT | {"settings": {"training": {"packs_per_step": 2}}}]}, {}, "packs_per_step is set by the"),
        ({"recipes": {}, "recipes_without_atoms": {}}, {}, "phases.training.arms: expected at least one arm"),
    ],
)
def test_a_grid_that_makes_no_sense_is_refused(tmp_path: Path, grid: Any, arms: Any, message: str) -> None:
    path = write(tmp_path, grid=GRID | grid, arms=arms)
    with pytest.raises(ConfigError, match=message):
        load(path)


def test_every_length_needs_its_reference(tmp_path: Path) -> None:
    grid = GRID | {"lengths": [SHORT, LONG | {"atoms": [16]}]}
    with pytest.raises(ConfigError, match=r"MSL 32 \(concat_32_atom_16, documents_32\), found concat_32_atom_32 "):
        described(write(tmp_path, grid=grid))
    described(write(tmp_path, grid=grid, reference="documents_{msl}"))


def test_an_arm_may_have_another_reference_which_must_be_an_arm_of_its_length(tmp_path: Path) -> None:
    def compared(**references: str) -> dict[str, str]:
        path = write(tmp_path, grid=documents_alone(), reference="documents_{msl}", references=references)
        study, runs = load(path)
        arms = describe_arms(study.chunking, runs)
        return {arm.name: study.chunking.reference_of(arm.name, arm.max_sequence_length) for arm in arms.values()}

    same = {"documents_16": "documents_16", "documents_32": "documents_32"}
    assert compared() == compared(**same) == same
    with pytest.raises(ConfigError, match=r"references: expected .* MSL 16 \(documents_16\), found documents_32"):
        compared(documents_16="documents_32")
    with pytest.raises(ConfigError, match=r"references: expected arms \(documents_16, documents_32\), found typo"):
        compared(typo="documents_16")


@pytest.mark.parametrize("epochs", [1, 2])
def test_rows_that_are_drawn_again_are_told_from_those_that_keep_their_order(tmp_path: Path, epochs: int) -> None:
    redrawn = {"documents": DOCUMENTS, "cuts": CONCAT}
    grid = {"lengths": [SHORT], "recipes": {"concat": CONCAT}, "recipes_without_atoms": redrawn}
    path = write(tmp_path, grid=grid, training={"epochs": epochs}, references={"documents_16": "cuts_16"})
    found = ChunkingStudy(path, ()).unnamed
    changed = {"order of rows in later epochs": ("kept", "drawn again")}
    assert found == ({"cuts_16": changed} if epochs > 1 else {}), "documents have a reference that is drawn again too"


def test_the_shipped_ablation_changes_one_thing_at_a_time() -> None:
    study = ChunkingStudy(CONFIGS / "studies/isolation_mini.yaml", ())
    assert len(study.runs) == 24
    assert study.evaluations == (), "each run evaluates the documents itself"
    assert study.unnamed == {}
    references = {arm: study.reference_of(arm) for arm in study.arms}
    assert references == {arm: arm.partition("_")[0] for arm in study.arms}


@pytest.mark.parametrize("training", [{"epochs": None, "steps": 9}, {"epochs": 0.5}])
def test_runs_without_a_whole_epoch_are_refused(tmp_path: Path, training: Any) -> None:
    with pytest.raises(ConfigError, match=r"run training/documents_16/seed_1 .* training\.epochs to 1 or more"):
        described(write(tmp_path, grid=documents_alone(), training=training, reference="documents_{msl}"))


def test_arms_of_a_length_have_as_many_epochs(tmp_path: Path) -> None:
    longer = {"data.recipe.max_sequence_length": 16, "data.pack_length": 16, "training.epochs": 4}
    path = write(tmp_path, grid=GRID | {"lengths": [SHORT]}, reference="documents_{msl}", arms={"longer": longer})
    with pytest.raises(ConfigError, match=r"longer of MSL 16 have training\.epochs 2 and 4"):
        described(path)


def test_positions_whose_parameters_depend_on_the_length_are_refused(tmp_path: Path) -> None:
    model, reference = {"positions": "learned"}, "documents_{msl}"
    path = write(tmp_path, grid=documents_alone(), model=model, reference=reference)
    with pytest.raises(ConfigError, match="16 positions in documents_16 and 32 positions in documents_32"):
        described(path)
    same = model | {"max_positions": 32}
    assert len(described(write(tmp_path, grid=documents_alone(), model=same, reference=reference))) == 2


def documents_alone() -> dict[str, Any]:
    return GRID | {"recipes": {}}


def test_arms_of_one_seed_begin_with_the_same_weights(tmp_path: Path) -> None:
    _, runs = load(write(tmp_path, grid=GRID))
    weights = {run.key: torch.cat([one.detach().flatten() for one in model_of(run).parameters()]) for run in runs}
    of_seed = [[weights[run.key] for run in runs if run.seed == seed] for seed in (1, 2)]
    for first, *others in of_seed:
        assert len(others) == 5
        assert all(torch.equal(first, other) for other in others)
    assert not torch.equal(of_seed[0][0], of_seed[1][0])


def model_of(run: StudyRun) -> Model:
    """Returns the model as training builds it, with a small vocabulary."""
    return new_model(
        run.config.model,
        vocabulary_size=64,
        max_positions=run.config.max_positions,
        attention_backend="reference",
        seed=run.config.run.seed,
    )


def test_every_run_of_a_length_is_evaluated_on_the_same_documents(tmp_path: Path) -> None:
    both = {"concat": CONCAT, "documents": DOCUMENTS}
    study, runs = load(write(tmp_path, grid=GRID | {"recipes": {}, "recipes_without_atoms": both}))
    found = held_out_evaluations(study, runs)
    cuts = [run.key for run in runs if run.config.data.recipe.kind == "concat"]
    assert [one.starts_from for one in found] == cuts, "runs on documents alone evaluate them in training"
    places = {(one.arm, one.prepared_dir) for one in found}
    assert len(places) == 2, "one for each length"
    of_documents = {run.config.prepared_dir for run in runs if run.config.data.recipe.kind == "documents"}
    assert {place for _, place in places} == of_documents, "the data of those runs"
    alone = {"padding": {"data.recipe": {"kind": "padding", "end_of_text_in_loss": "none"}}}
    study_of_padding, runs_of_padding = load(write(tmp_path, grid=GRID | {"recipes": alone}))
    without_ends = held_out_evaluations(study_of_padding, runs_of_padding)
    assert len(without_ends) == len(runs_of_padding)
    assert len({one.prepared_dir for one in without_ends}) == 2, "one for each length"
    silent = study.model_copy(update={"chunking": study.chunking.model_copy(update={"documents_alone": False})})
    assert held_out_evaluations(silent, runs) == ()
    some = study.model_copy(update={"chunking": study.chunking.model_copy(update={"documents_packs": 1})})
    assert len(held_out_evaluations(some, runs)) == len(runs), "not the same ones"


@pytest.mark.parametrize(("ends", "counts"), [("all", True), ("closing", False), ("none", False)])
def test_padding_is_in_the_loss_of_recipes_that_say_so(tmp_path: Path, ends: str, counts: bool) -> None:
    padding = {"padding": {"data.recipe": {"kind": "padding", "end_of_text_in_loss": ends}}}
    arms = described(write(tmp_path, grid=GRID | {"recipes": padding}, reference="documents_{msl}"))
    assert {arm.counts_padding for arm in arms.values() if arm.kind == "padding"} == {counts}
    assert not any(arm.counts_padding for arm in arms.values() if arm.kind == "documents")
