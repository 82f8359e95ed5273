"""Shards are prepared to the set whose pairs they hold, and train the same steps; the evaluation set is picked."""

import json
import re
from pathlib import Path

import h5py
import numpy as np
import pytest
import yaml
from forked_ranks import run_ranks
from pair_sources import pair_run_values
from repository import ROOT
from run_files import write_run_file
from shard_files import fixed_arrays, random_rows, write_arrays, write_packed, write_prepared
from small_run import evenpack, metrics, train_on

from evenpack.config import load_run_file
from evenpack.data.prepared import PreparedData
from evenpack.data.shards.writing import ShardForm, WrittenLayout
from evenpack.engine.config import RunConfig

STEPS = 3
EXACT = ("step", "loss", "token_loss", "next_sentence_loss", "accuracy", "gradient_norm", "targets", "order_hash")
LONGEST, MASKS = 48, 7
NOT_EQUAL = {"view.json", "pairs.journal.json", "first_starts.npy", "second_starts.npy"}
"""They name the recipe and the origin: the documents that pairs are from, which shards do not tell."""


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepares text with static masks."""
    folder = tmp_path_factory.mktemp("text")
    recipe = {
        "kind": "sentence_pairs",
        "max_sequence_length": LONGEST,
        "duplication_factor": 2,
        "static_masks": {"max_predictions": MASKS},
    }
    training = {"steps": STEPS, "evaluate_every_steps": STEPS}
    path = write_run_file(folder / "run.yaml", pair_run_values(folder, data={"recipe": recipe}, training=training))
    evenpack("prepare", path)
    return path


def run_of_shards(run_file: Path, shards: Path, folder: Path) -> Path:
    """Returns the same run with another source of pairs."""
    folder.mkdir()
    config = load_run_file(run_file, RunConfig, [])
    values = json.loads(config.model_dump_json())
    values["run"]["output_dir"] = str(folder / "out")
    values["data"] |= {
        "prepared_dir": str(folder / "data"),
        "sources": {
            name: {
                "kind": "hdf5",
                "path": str(shards / name / "train"),
                "validation_path": str(shards / name / "validation"),
                "weight": source["weight"],
            }
            for name, source in values["data"]["sources"].items()
        },
        "tokenizer": {"kind": "bert", "path": str(config.prepared_dir / "tokenizer")},
        "recipe": {"kind": "masked_pairs", "max_sequence_length": LONGEST, "max_predictions": MASKS},
    }
    return write_run_file(folder / "run.yaml", values)


def write_shards(run_file: Path, shards: Path, layout: WrittenLayout = "fixed", *, rows_per_shard: int = 1000) -> None:
    """Writes the prepared pairs of a run as shards."""
    config = load_run_file(run_file, RunConfig, [])
    written = PreparedData.open(config.prepared_dir, config.data)
    form = ShardForm(layout=layout, row_slots=LONGEST, mask_slots=MASKS, vocabulary_size=written.vocabulary_size)
    write_prepared(written, shards, form, rows_per_shard=rows_per_shard)


def stored(directory: Path) -> dict[str, bytes]:
    """Returns every file of the splits except those that name their origin."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.glob("sources/*/*/*"))
        if path.name not in NOT_EQUAL
    }


@pytest.mark.parametrize("layout", ["fixed", "variable"])
def test_a_set_written_and_read_again_is_the_same_to_the_bit(
    run_file: Path, layout: WrittenLayout, tmp_path: Path
) -> None:
    shards = tmp_path / "shards"
    write_shards(run_file, shards, layout, rows_per_shard=40)
    with h5py.File(min((shards / "wiki/train").iterdir())) as file:
        assert (file["input_ids"].compression == "gzip") == (layout == "fixed") == ("input_mask" in file)

    again = run_of_shards(run_file, shards, tmp_path / "again")
    evenpack("prepare", again)
    before, after = run_file.parent / "data", tmp_path / "again/data"
    assert len(stored(before)) == 4 * 11
    assert stored(after) == stored(before)

    if layout == "fixed":
        run_ranks(train_on, 1, *(load_run_file(path, RunConfig, []) for path in (run_file, again)))
        trained = [
            [{name: record[name] for name in EXACT} for record in metrics(path.parent / "out")]
            for path in (run_file, again)
        ]
        assert [record["step"] for record in trained[0]] == list(range(1, STEPS + 1))
        assert trained[0] == trained[1]
        assert metrics(run_file.parent / "out")[-1]["validation"] == metrics(tmp_path / "again/out")[-1]["validation"]


def test_the_evaluation_set_is_picked_from_shards(run_file: Path, tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    write_shards(run_file, shards)
    picked = tmp_path / "eval.hdf5"
    report = json.loads(
        evenpack("shards pick", shards / "wiki/train", str(picked), options=["--samples", "10", "--json"]).stdout
    )
    (source,) = (shards / "wiki/train").iterdir()
    with h5py.File(source) as file, h5py.File(picked) as found:
        count = len(file["input_ids"])
        chosen = [int(sample * (count / 10)) for sample in range(10)]
        assert report == {"file": str(picked), "samples": 10, "candidates": count, "layout": "fixed"}
        assert sorted(found) == sorted(file)
        for name in file:
            assert np.array_equal(found[name][:], file[name][:][chosen])
            assert found[name].dtype == file[name].dtype

    # ... which the rows that it was picked from must not be trained with
    again = run_of_shards(run_file, shards, tmp_path / "again")
    refused = evenpack("prepare", again, f"data.sources.wiki.validation_path={picked}", expected=2)
    message = " ".join(refused.stderr.split())
    assert f"{source}, row 0 (from 0): the evaluation set has the same tokens at {picked}, row 0" in message
    assert not (tmp_path / "again/data/sources/wiki").exists()
    assert not (tmp_path / "again/data/manifest.json").exists()


def test_what_cannot_be_picked_is_refused(run_file: Path, tmp_path: Path) -> None:
    write_shards(run_file, tmp_path / "shards")
    rows = tmp_path / "shards/code/validation"
    few = evenpack("shards pick", rows, str(tmp_path / "eval.hdf5"), expected=2).stderr
    assert "10000 samples cannot be picked from" in " ".join(few.split())
    assert not (tmp_path / "eval.hdf5").exists()
    assert "is not a file, a folder with" in evenpack("shards pick", tmp_path / "none", "eval.hdf5", expected=2).stderr


@pytest.mark.slow
def test_the_commands_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    arrays = {name: np.concatenate([array] * 51) for name, array in fixed_arrays(random_rows(200, seed=7)).items()}
    write_arrays(tmp_path / "hdf5/eval/eval_all.hdf5", arrays, chunk_rows=1000)
    write_packed(tmp_path / "hdf5/training/part_00000.hdf", [[row] for row in random_rows(90, seed=8)])
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{number}" for number in range(85))]
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert/vocab.txt").write_text("\n".join(words) + "\n")

    page = (ROOT / "docs/data.md").read_text(encoding="utf-8").partition("## HDF5 shards")[2].partition("\n## ")[0]
    (section,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    values = pair_run_values(tmp_path)
    write_run_file(tmp_path / "RUN.yaml", values | {"data": yaml.safe_load(section)["data"]})
    commands = re.findall(r"^evenpack (.*)$", page, re.MULTILINE)
    assert [command.partition(" ")[0] for command in commands] == ["shards", "prepare", "plan"]
    for command in commands:
        evenpack(*_words(command))
    with h5py.File(tmp_path / "eval_10k.hdf5") as file:
        assert len(file["input_ids"]) == 10_000


def _words(command: str) -> tuple[str, Path, str]:
    """Returns the arguments in the form of `evenpack`: the command, its first argument, the others."""
    name, *rest = command.split()
    if name == "shards":
        name, rest = f"{name} {rest[0]}", rest[1:]
    return name, Path(rest[0]), *rest[1:]  # type: ignore[return-value]
