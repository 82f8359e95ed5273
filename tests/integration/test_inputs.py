"""Inputs of `study packing` as a user types them, each in a process of its own."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from small_run import evenpack
from wordpiece import write_vocabulary

TEXTS = ["the cat sat.", "the cats", "it", "on the mat the cat sat", "the mat"] * 40
LENGTHS = [6, 5, 3, 8, 4] * 40
"""With [CLS] and [SEP]."""


@pytest.fixture
def glue(tmp_path: Path) -> Path:
    folder = tmp_path / "glue"
    (folder / "cola").mkdir(parents=True)
    table = pa.table({"sentence": TEXTS, "label": [1] * 200, "idx": range(200), "length": LENGTHS})
    pyarrow.parquet.write_table(table, folder / "cola" / "train-00000-of-00001.parquet")
    return folder


def test_the_same_lengths_come_out_of_a_column_of_texts_and_one_of_numbers(glue: Path, tmp_path: Path) -> None:
    tokenizer = write_vocabulary(tmp_path / "bert")
    file = glue / "cola" / "train-00000-of-00001.parquet"
    options = ["--pack-length", "7", "--long", "truncate", "--json"]
    inputs = [
        (file, ["--column", "sentence", "--tokenizer", tokenizer]),
        (file, ["--column", "length"]),
    ]
    for source, choice in inputs:
        done = evenpack("study packing", source, options=[*choice, *options], HF_HOME=str(tmp_path / "hub"))
        values = json.loads(done.stdout)
        assert values["histogram"] == [0, 0, 40, 40, 40, 40, 40], source
        assert values["long_sequences"] == {"policy": "truncate", "sequences": 40, "tokens_lost": 40}
        tokenised = "--tokenizer" in choice
        assert ("tokenising  100 %  200 documents  1.04k tokens" in done.stderr) == tokenised
        assert ("to go" in done.stderr) == tokenised


def test_study_packing_takes_the_same_options(glue: Path) -> None:
    file = glue / "cola" / "train-00000-of-00001.parquet"
    done = evenpack("study packing", file, options=["--column", "length", "--depths", "1", "--json"])
    assert [(row["algorithm"], row["packs"]) for row in json.loads(done.stdout)["packings"]] == [("none", 200)]
    refused = evenpack("study packing", file, options=["--column", "lenght"], expected=2)
    assert "has no column 'lenght'; did you mean 'length'?" in refused.stderr
    assert "Traceback" not in refused.stderr
