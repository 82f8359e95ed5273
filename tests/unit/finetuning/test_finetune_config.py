"""The run file of a fine-tuning."""

from pathlib import Path
from typing import Any

import pytest
from finetuning_tasks import finetune_values
from repository import CONFIGS

from evenpack.config import load_run_file, validate
from evenpack.data.tasks.glue import GLUE_TASKS
from evenpack.errors import ConfigError
from evenpack.finetuning.config import FinetuneConfig
from evenpack.finetuning.tasks import TASKS, SentenceTask

SHIPPED = sorted((CONFIGS / "finetune").glob("*.yaml"))


def values(**changes: dict[str, Any]) -> dict[str, Any]:
    found = finetune_values("sst2", Path("glue"), Path("bert"), Path("out"))
    for section, keys in changes.items():
        found.setdefault(section, {}).update(keys)
    return found


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_run_file_is_valid_and_its_header_names_it(path: Path) -> None:
    config = load_run_file(path, FinetuneConfig)
    assert config.run.name == config.data.task == path.stem
    assert f"evenpack finetune finetune/{path.stem} " in path.read_text()
    assert len(config.run.seeds) == 5


def test_every_task_of_glue_can_be_fine_tuned_by_the_same_name() -> None:
    found = {name: task.glue for name, task in TASKS.items() if isinstance(task, SentenceTask)}
    assert found == GLUE_TASKS
    assert TASKS["mnli"].training_file == "train.tsv"
    assert TASKS["mnli"].evaluation_files == ("dev_matched.tsv", "dev_mismatched.tsv")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"task": "cole"}}, r"data\.task: there is no task 'cole'; did you mean 'cola'\?"),
        ({"run": {"seeds": [1, 2, 1]}}, r"expected different whole numbers .* found \[1, 2, 1\]"),
        ({"attention": {"isolate": False}}, "isolate: false is for pretraining"),
        ({"data": {"task": "squad", "window_stride": 500}}, r"window_stride \(500\) would leave out"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, dict[str, Any]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(values(**changes), FinetuneConfig, origin="test")
