"""Static masks: prepared, trained by two ranks with loader processes, evaluated, and refused."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from forked_ranks import run_ranks
from pair_sources import pair_run_values
from run_files import changed, write_run_file
from small_run import EXACT, evenpack, metrics, steps, train_on

from evenpack.config import load_run_file
from evenpack.engine.config import RunConfig

STEPS = 3


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("static_masks")
    values = pair_run_values(
        folder,
        data={"recipe": {"kind": "sentence_pairs", "max_sequence_length": 48, "duplication_factor": 2}},
        training={"steps": STEPS, "evaluate_every_steps": STEPS, "loader_workers": 1},
    )
    return write_run_file(folder / "run.yaml", values)


MASKS = ("data.recipe.static_masks.share=0.25", "data.recipe.static_masks.max_predictions=8")


@pytest.mark.slow
def test_prepare_train_and_evaluate_with_masks_drawn_once(run_file: Path) -> None:
    out = run_file.parent
    evenpack("prepare", run_file, *MASKS)
    config = load_run_file(run_file, RunConfig, MASKS)
    without_loaders = changed(config, run={"output_dir": out / "alone"}, training={"loader_workers": 0})
    run_ranks(train_on, 2, config, without_loaders)
    assert steps(out / "out", *EXACT) == steps(out / "alone", *EXACT)
    records = metrics(out / "out")
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert records[0]["token_loss"] == pytest.approx(math.log(120), rel=0.05)
    folders = [out / "data/sources" / source for source in ("wiki", "code")]
    masks, pairs = (
        sum(len(np.load(folder / "train" / name)) for folder in folders)
        for name in ("mask_labels.npy", "next_sentence_labels.npy")
    )
    targets, sequences = (sum(record[name] for record in records) for name in ("targets", "sequences"))
    assert targets / sequences == pytest.approx(masks / pairs, rel=0.2)

    found = json.loads(evenpack("evaluate", run_file, *MASKS, options=["--json"]).stdout)["sources"]
    assert found["wiki"] == pytest.approx(records[-1]["validation"]["wiki"], rel=1e-5)
    for folder in folders:
        assert found[folder.name]["targets"] == len(np.load(folder / "validation/mask_labels.npy"))

    refused = evenpack("train", run_file, MASKS[0], "data.recipe.static_masks.max_predictions=9", expected=2)
    assert "data.recipe.static_masks.max_predictions: prepared with 8, this run has 9" in refused.stderr

    (folders[1] / "train/mask_positions.npy").unlink()
    refused = evenpack("train", run_file, *MASKS, "run.output_dir=" + str(out / "again"), expected=2)
    assert "train/mask_positions.npy" in refused.stderr
    assert "is damaged" in refused.stderr
    assert not (out / "again/metrics.jsonl").exists()
