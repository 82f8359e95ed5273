"""Datasets as inputs, in local folders with the form of the hub's."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from wordpiece import write_vocabulary

from evenpack.data.tasks.glue import GLUE_TASKS
from evenpack.errors import ConfigError, DataError
from evenpack.studies.lengths.options import SubjectOptions
from evenpack.studies.lengths.reading import read_histogram

COLA = {"sentence": ["the cat sat.", "it", "cats"], "label": [1, 0, 1], "idx": [0, 1, 2]}
MRPC = {
    "sentence1": ["the cat", "it sat"],
    "sentence2": ["cats.", "on the mat"],
    "label": [1, 0],
    "idx": [0, 1],
}
README = """---
configs:
- config_name: cola
  data_files:
  - {split: train, path: cola/train-*}
  - {split: validation, path: cola/validation-*}
- config_name: sst2
  data_files:
  - {split: train, path: cola/validation-*}
- config_name: mrpc
  data_files:
  - {split: train, path: mrpc/train-*}
---
"""


def write_split(folder: Path, split: str, columns: dict[str, list[Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pa.table(columns), folder / f"{split}-00000-of-00001.parquet")


@pytest.fixture
def glue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Writes two tasks in the form of nyu-mll/glue, without its README."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "nyu-mll" / "glue"
    write_split(folder / "cola", "train", COLA)
    write_split(folder / "cola", "validation", {name: values[:1] for name, values in COLA.items()})
    write_split(folder / "mrpc", "train", MRPC)
    return folder


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    return write_vocabulary(tmp_path / "bert")


def counts(source: str, **options: str) -> list[int]:
    return read_histogram(source, SubjectOptions(**options)).counts.tolist()  # type: ignore[arg-type]


@pytest.mark.parametrize("with_readme", [False, True])
def test_a_task_of_glue_has_its_columns(with_readme: bool, glue: Path, tokenizer: str) -> None:
    if with_readme:
        (glue / "README.md").write_text(README)
    assert counts(f"{glue}:cola", tokenizer=tokenizer) == [0, 0, 1, 1, 0, 1]
    assert counts(f"{glue}:cola", tokenizer=tokenizer, split="validation") == [0, 0, 0, 0, 0, 1]
    assert counts(f"{glue}:mrpc", tokenizer=tokenizer) == [0] * 7 + [2]
    assert counts(f"{glue}:mrpc", tokenizer=tokenizer, column="sentence1") == [0, 0, 0, 2]


def test_a_subset_may_be_defined_by_the_readme_alone(glue: Path, tokenizer: str) -> None:
    (glue / "README.md").write_text(README)
    assert counts(f"{glue}:sst2", tokenizer=tokenizer) == [0, 0, 0, 0, 0, 1]


def test_a_folder_called_glue_in_the_current_one_is_taken(
    glue: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(glue.parent)
    assert counts("glue:cola", tokenizer=tokenizer) == [0, 0, 1, 1, 0, 1]
    monkeypatch.chdir(glue.parent.parent)
    assert counts("nyu-mll/glue:cola", tokenizer=tokenizer) == [0, 0, 1, 1, 0, 1]


def test_glue_is_asked_of_the_hub_by_its_full_name(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    asked = []

    def load_dataset_builder(name: str, subset: str | None) -> SimpleNamespace:
        def as_dataset(split: str) -> datasets.Dataset:
            asked.append((name, subset, split))
            return datasets.Dataset.from_dict(MRPC if subset == "mrpc" else {"text": ["it"]})

        return SimpleNamespace(download_and_prepare=lambda: None, as_dataset=as_dataset)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.load_dataset_builder", load_dataset_builder)
    assert counts("glue:mrpc", tokenizer=tokenizer) == [0] * 7 + [2]
    assert counts("nyu-mll/glue:mrpc", tokenizer=tokenizer, split="test") == [0] * 7 + [2]
    assert counts("wiki", tokenizer=tokenizer) == counts("some/wiki:en", tokenizer=tokenizer) == [0, 0, 1]
    assert asked == [
        ("nyu-mll/glue", "mrpc", "train"),
        ("nyu-mll/glue", "mrpc", "test"),
        ("wiki", None, "train"),
        ("some/wiki", "en", "train"),
    ]


def test_a_task_of_glue_asks_for_a_tokenizer_before_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delattr("datasets.load_dataset_builder")
    with pytest.raises(
        ConfigError, match=r"glue:mrpc are the lengths of its texts \(sentence1, sentence2\): they need --tokenizer"
    ):
        counts("glue:mrpc")


def test_nine_tasks_are_known_and_three_others_are_not() -> None:
    assert len(GLUE_TASKS) == 9
    assert sum(len(task.hub_texts or task.texts) == 2 for task in GLUE_TASKS.values()) == 7
    with pytest.raises(ConfigError, match=r"'colla' is not a task of GLUE; did you mean 'cola'\?"):
        counts("glue:colla", tokenizer="anything")
    with pytest.raises(ConfigError, match="'' is not a task of GLUE"):
        counts("glue", tokenizer="anything")


def test_a_dataset_of_lengths_or_lists_needs_no_tokenizer(glue: Path) -> None:
    folder = glue.parent / "lists"
    write_split(folder, "train", {"input_ids": [[1, 2], [3]], "size": [4, 4]})
    assert counts(str(folder), column="input_ids") == [1, 1]
    assert counts(str(folder), column="size") == [0, 0, 0, 2]


def test_what_a_dataset_lacks_is_named(glue: Path, tokenizer: str) -> None:
    with pytest.raises(DataError, match=r"split='test'\) failed: .*test.*train.*validation"):
        counts(f"{glue}:cola", tokenizer=tokenizer, split="test")
    with pytest.raises(DataError, match=r"has no column 'sentenc'; did you mean 'sentence'\?"):
        counts(f"{glue}:cola", tokenizer=tokenizer, column="sentenc")
    with pytest.raises(DataError, match=r"cola, train, row 1 \(from 0\): a length must be .* found 0"):
        counts(f"{glue}:cola", column="label")


def test_a_folder_that_is_no_dataset_is_named(glue: Path, tokenizer: str) -> None:
    empty = glue.parent / "empty"
    empty.mkdir()
    with pytest.raises(DataError, match=rf"dataset '{empty}': datasets.load_dataset\('{empty}', .*failed"):
        counts(str(empty), tokenizer=tokenizer)
    with pytest.raises(DataError, match="failed"):
        counts(f"{empty}:part", tokenizer=tokenizer)
    (empty / "sources").mkdir()
    (empty / "manifest.json").write_text("{}")
    with pytest.raises(DataError, match=r"was written by `evenpack prepare`: give its run file"):
        counts(str(empty))
