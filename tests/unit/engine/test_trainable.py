"""Checks of a run before training that evaluation and export do not need."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from run_files import pair_run_values, prepared, run_config, text_sources

from evenpack.config import with_values
from evenpack.engine.config import MetricsSection, RunConfig
from evenpack.engine.resolving.resolve import open_run
from evenpack.errors import ConfigError
from evenpack.launcher.planning import plan_training

SUBMISSION = {"submission_org": "nobody", "submission_platform": "a CPU", "submission_benchmark": "bert"}


def mlperf_run(folder: Path, **data: Any) -> RunConfig:
    documents = [f"Pack {number} goes here. Rank {number} comes next." for number in range(40)]
    data = {"sources": text_sources(folder, {"lines": documents}), "validation_fraction": 0.2, **data}
    training = {"target_accuracy": 0.72, "evaluate_every_steps": 1}
    return prepared(run_config(pair_run_values("bert", folder, data=data, training=training, mlperf=SUBMISSION)))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({}, "section mlperf: needs the package mlperf-logging"),
        ({"mlperf": None, "metrics": MetricsSection(tensorboard=True)}, r"metrics.tensorboard: .*pip install"),
    ],
    ids=["mlperf", "tensorboard"],
)
def test_a_package_that_only_training_needs_is_named_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any], message: str
) -> None:
    config = mlperf_run(tmp_path).model_copy(update=sections)
    assert plan_training(config, ranks=1).cost.steps == 4
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    open_run(config)
    with pytest.raises(ConfigError, match=message):
        plan_training(config, ranks=1)


def test_a_target_with_nothing_held_out_to_measure_it_on_is_refused(tmp_path: Path) -> None:
    """Such a run could not end before its last step, whatever its accuracy."""
    config = mlperf_run(tmp_path, validation_fraction=0.0)
    with pytest.raises(ConfigError, match=r"target_accuracy \(0\.72\) is measured on held-out documents"):
        plan_training(config, ranks=1)


def test_a_plan_says_which_weights_a_run_starts_from_or_that_there_are_none_yet(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = mlperf_run(tmp_path)
    assert plan_training(config, ranks=1).start.initial_weights is None
    folder = tmp_path / "weights"
    started = with_values(config, {"training": {"initialize_from": folder}}, origin="test")
    assert plan_training(started, ranks=1).start.initial_weights == f"none yet: {folder}"
    assert f"{folder} does not exist" in caplog.text
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert plan_training(started, ranks=1).start.initial_weights == f"{folder} (transformers)"
