"""`evenpack finetune` learns a rule, resumes at seeds, and leaves nothing after wrong input."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from finetuning_tasks import (
    finetune_values,
    write_encoder,
    write_finetune_file,
    write_questions,
    write_scores,
    write_sentences,
)
from small_run import evenpack
from transformers import pipeline


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("encoder") / "bert")


@pytest.fixture(scope="module")
def trained(encoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a run file whose two seeds are done."""
    folder = tmp_path_factory.mktemp("sst2")
    write_sentences(folder / "task", training=240, evaluation=60)
    training = {"epochs": 2, "learning_rate": 5e-3, "dropout": 0.1}
    values = finetune_values("sst2", folder / "task", encoder, folder / "out", **training)
    values["run"]["seeds"] = [0, 1]
    path = write_finetune_file(folder / "finetune.yaml", values)
    done = evenpack("finetune", path, options=["--json"])
    (folder / "shown.json").write_text(done.stdout)
    return path


def results(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path.parent / "out" / "results.json").read_text())
    return found


@pytest.mark.slow
def test_the_rule_is_learnt_far_beyond_what_guessing_gets(trained: Path) -> None:
    found = results(trained)
    for seed in found["seeds"]:
        low, high = seed["intervals"]["dev"]["accuracy"]
        assert found["guesses"]["dev"]["accuracy"] < 0.65
        assert 0.75 < low <= seed["metrics"]["dev"]["accuracy"] <= high
        assert seed["losses_by_epoch"][-1] < seed["losses_by_epoch"][0]
        assert seed["sequences_per_step"] == 8
        assert seed["sequences_per_pack"] > 3
        assert seed["steps"] == 60
    assert [seed["seed"] for seed in found["seeds"]] == [0, 1]


def test_json_is_what_the_file_holds(trained: Path) -> None:
    assert json.loads((trained.parent / "shown.json").read_text()) == results(trained)


def test_a_second_call_trains_nothing_again_and_a_missing_seed_alone(trained: Path) -> None:
    before = results(trained)
    seed = trained.parent / "out" / "seed_1.json"
    seed.unlink()
    done = evenpack("finetune", trained)
    assert "seed 0 is already done" in done.stderr
    assert "seed 1: step 60/60" in done.stderr
    assert "seed 0: step" not in done.stderr
    assert "most frequent label" in done.stdout
    after = results(trained)
    timings = ("training_seconds", "sequences_per_second")
    for old, new in zip(before["seeds"], after["seeds"], strict=True):
        assert {key: old[key] for key in old if key not in timings} == {
            key: new[key] for key in new if key not in timings
        }


@pytest.mark.slow
def test_a_model_that_was_not_saved_is_had_by_training_its_seed_again(trained: Path) -> None:
    before, out = results(trained), trained.parent / "out"
    done = evenpack("finetune", trained, "run.save_models=true")
    folder = out / f"seed_{before['median_seed']}"
    assert f"the model of seed {before['median_seed']}, for transformers, is in {folder}" in done.stderr
    assert sorted(path.name for path in out.iterdir() if path.is_dir()) == ["seed_0", "seed_1"]
    accuracy = accuracy_by_transformers(folder, trained.parent / "task" / "dev.tsv")
    assert accuracy == results(trained)["seeds"][before["median_seed"]]["metrics"]["dev"]["accuracy"]
    assert ": step" not in evenpack("finetune", trained, "run.save_models=true").stderr


def accuracy_by_transformers(folder: Path, file: Path) -> float:
    """Predicts one sentence at a time, as a user would."""
    classify = pipeline("text-classification", model=str(folder), device="cpu")
    rows = [line.split("\t") for line in file.read_text().splitlines()[1:]]
    return sum(classify(sentence)[0]["label"] == label for sentence, label in rows) / len(rows)


def test_other_settings_are_refused_in_the_same_folder(trained: Path) -> None:
    done = evenpack("finetune", trained, "training.epochs=3", expected=2)
    assert "holds results of other settings: training.epochs: 2 there, 3 here" in done.stderr


def test_a_label_outside_the_tasks_set_leaves_nothing(trained: Path, tmp_path: Path) -> None:
    task = Path(shutil.copytree(trained.parent / "task", tmp_path / "task"))
    (task / "dev.tsv").write_text((task / "dev.tsv").read_text() + "the cat\tgood\n")
    out = tmp_path / "out"
    overrides = [f"data.folder={task}", f"run.output_dir={out}"]
    done = evenpack("finetune", trained, *overrides, options=["--json"], expected=2)
    assert (
        f"{task}/dev.tsv, line 62: expected a label of SST-2 (0, 1), found 'good'" in json.loads(done.stdout)["message"]
    )
    assert not out.exists()


def test_weights_of_too_few_positions_or_none_are_refused(trained: Path, tmp_path: Path) -> None:
    done = evenpack("finetune", trained, "data.max_sequence_length=49", f"run.output_dir={tmp_path}", expected=2)
    assert "has 48 positions, and data.max_sequence_length is 49" in done.stderr
    done = evenpack("finetune", trained, "training.initialize_from=", f"run.output_dir={tmp_path}", expected=2)
    assert "give training.initialize_from=PATH" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("task", ["squad", "stsb"])
def test_spans_and_scores_go_the_same_way(task: str, encoder: Path, tmp_path: Path) -> None:
    write = {"squad": lambda: write_questions(tmp_path / "task", questions=30)}
    write.get(task, lambda: write_scores(tmp_path / "task", rows=30))()
    values = finetune_values(task, tmp_path / "task", encoder, tmp_path / "out")
    evenpack("finetune", write_finetune_file(tmp_path / "finetune.yaml", values))
    found = results(tmp_path / "finetune.yaml")
    (metrics,) = found["seeds"][0]["metrics"].values()
    assert set(metrics) == ({"f1", "exact_match"} if task == "squad" else {"spearman", "pearson"})
    assert bool(found["guesses"]) == (task == "stsb")
