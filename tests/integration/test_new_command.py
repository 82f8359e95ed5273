"""`evenpack new` writes a whole, commented run file that reads the user's text."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest
from small_run import evenpack

from evenpack.config import load_run_file
from evenpack.engine.config import RunConfig
from evenpack.errors import ConfigError, DataError
from evenpack.launcher.new_run.run_file import MODELS, NewRun, run_values, write_run_file
from evenpack.launcher.new_run.sources import source_section

TEXTS = ["a first document", "a second one"]


def write(folder: Path, kind: str) -> Path:
    """Writes text of a kind, as a user may have it."""
    match kind:
        case "jsonl":
            (path := folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
        case "jsonl with another key":
            (path := folder / "text.jsonl").write_text("\n" + json.dumps({"id": 1, "body": TEXTS[0]}) + "\n")
        case "folder of text":
            (path := folder / "texts").mkdir()
            (path / "one.txt").write_text(TEXTS[0])
            (path / "README").write_text("of no known kind")
        case "parquet":
            pa.parquet.write_table(pa.table({"number": [1, 2], "content": TEXTS}), path := folder / "text.parquet")
        case "saved data set":
            datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(path := folder / "saved")
    return path


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("jsonl", {"kind": "jsonl", "text_key": "text"}),
        ("jsonl with another key", {"kind": "jsonl", "text_key": "body"}),
        ("folder of text", {"kind": "text"}),
        ("parquet", {"kind": "parquet", "text_key": "content"}),
        ("saved data set", {"kind": "arrow", "text_key": "text"}),
    ],
)
def test_the_run_file_names_the_text_as_it_is(kind: str, expected: dict[str, Any], tmp_path: Path) -> None:
    data, run_file = write(tmp_path, kind), tmp_path / "mine.yaml"
    done = evenpack("new", run_file, options=["--data", str(data), "--model", "gpt2_mini", "--devices", "0"])
    assert f"evenpack prepare {run_file}" in " ".join(done.stdout.split())
    config = load_run_file(run_file, RunConfig)
    assert config.run.name == "mine"
    source = config.data.sources["text"].model_dump(exclude_defaults=True) | {"kind": config.data.sources["text"].kind}
    found = {key: getattr(config.data.sources["text"], key) for key in expected}
    assert found == expected, source
    assert str(data) in run_file.read_text()


@pytest.mark.parametrize("devices", [0, 1, 3, 8, 64])
@pytest.mark.parametrize("model", MODELS)
def test_every_model_gets_a_step_that_its_devices_divide(model: str, devices: int, tmp_path: Path) -> None:
    source = {"kind": "jsonl", "path": "text.jsonl"}
    new = NewRun(name="mine", source=source, model=model, tokenizer=None, devices=devices)
    config = RunConfig.model_validate(run_values(new))
    packs, micro_batch = config.training.packs_per_step, config.training.packs_per_micro_batch
    assert packs is not None
    assert micro_batch is not None
    assert packs % ((devices or 2) * micro_batch) == 0
    assert config.training.precision == ("bf16_autocast" if devices else "fp32")
    shipped = RunConfig.model_validate(run_values(NewRun(**{**vars(new), "devices": 8})))
    assert shipped.training.packs_per_step is not None
    least = max(shipped.training.packs_per_step, devices)  # a pack for each rank
    assert packs == pytest.approx(least, rel=0.35)


@pytest.mark.parametrize("model", MODELS)
def test_every_key_is_explained(model: str, tmp_path: Path) -> None:
    source = {"kind": "jsonl", "path": "text.jsonl", "text_key": "text"}
    new = NewRun(name="mine", source=source, model=model, tokenizer=tmp_path / "vocabulary", devices=8)
    write_run_file(tmp_path / "mine.yaml", new)
    lines = (tmp_path / "mine.yaml").read_text().splitlines()
    assert max(map(len, lines)) <= 100
    for above, line in pairwise(lines):
        name = line.strip().partition(":")[0]
        if line.strip() and not line.strip().startswith("#") and name not in ("kind", "text"):
            assert above.strip().startswith("#"), line
    load_run_file(tmp_path / "mine.yaml", RunConfig)


def test_a_run_file_that_exists_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("mine")
    options = ["--data", str(write(tmp_path, "jsonl")), "--model", "gpt2_mini", "--devices", "0"]
    done = evenpack("new", tmp_path / "mine.yaml", options=options, expected=2)
    assert "exists already: choose another name" in done.stderr
    assert (tmp_path / "mine.yaml").read_text() == "mine"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "gpt2_mini", "--devices", "0"], "--data is missing, and there is no terminal to ask at"),
        (["--data", "DATA", "--devices", "0"], "--model is missing"),
        (["--data", "DATA", "--model", "gpt2_mni", "--devices", "0"], "did you mean 'gpt2_mini'?"),
        (["--data", "nowhere", "--model", "gpt2_mini", "--devices", "0"], "nowhere does not exist"),
        (
            ["--data", "DATA", "--text-key", "body", "--model", "gpt2_mini", "--devices", "0"],
            "no key 'body'; existing keys: 'text'",
        ),
    ],
)
def test_a_wrong_answer_is_refused_and_nothing_written(options: list[str], message: str, tmp_path: Path) -> None:
    data = str(write(tmp_path, "jsonl"))
    given = [data if option == "DATA" else option for option in options]
    done = evenpack("new", tmp_path / "mine.yaml", options=given, expected=2)
    assert message in " ".join(done.stderr.split())
    assert not (tmp_path / "mine.yaml").exists()


def test_a_folder_of_two_kinds_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "jsonl")
    write(tmp_path, "parquet")
    with pytest.raises(ConfigError, match="holds files of the kinds jsonl and parquet"):
        source_section(tmp_path, text_key=None)


def test_several_keys_with_strings_must_be_chosen_from(tmp_path: Path) -> None:
    (path := tmp_path / "text.jsonl").write_text(json.dumps({"title": "A", "body": "B"}) + "\n")
    with pytest.raises(ConfigError, match="has the keys title, body with strings, and none is 'text'"):
        source_section(path, text_key=None)
    assert source_section(path, text_key="body")["text_key"] == "body"


def test_a_file_without_a_document_is_refused(tmp_path: Path) -> None:
    (path := tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(DataError, match=r"empty\.txt holds no document"):
        source_section(path, text_key=None)
