"""A run that stops at its target, and its log for MLPerf under MLPerf's own checker."""

import json
import random
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from forked_ranks import run_ranks
from mlperf_checker import verdict
from run_files import pair_run_values, prepared, run_config, text_sources
from tiny_training import changed, never

from evenpack.engine.config import RunConfig
from evenpack.engine.reporting.metrics import read_metrics
from evenpack.engine.train import TrainOutcome, train_in
from evenpack.engine.world.distributed import World
from evenpack.errors import RunError

SUBMISSION = {"submission_org": "nobody", "submission_platform": "2 x CPU", "submission_benchmark": "bert"}


def documents() -> list[str]:
    """Returns texts in which nearly every word is the same, so that guessing it is right nine times in ten."""
    draw = random.Random(5)
    words = ["order", "rank", "step"]
    return [
        " ".join(
            " ".join(draw.choice(words) if draw.random() < 0.08 else "pack" for _ in range(7)) + "." for _ in range(4)
        )
        for _ in range(150)
    ]


def mlperf_run(folder: Path, **sections: Any) -> RunConfig:
    data = {"sources": text_sources(folder, {"lines": documents()}), "validation_fraction": 0.2}
    training = {"steps": 60, "target_accuracy": 0.72, "evaluate_every_samples": 60, **sections.pop("training", {})}
    values = pair_run_values(
        "bert",
        folder,
        data=data,
        training=training,
        optimizer={"learning_rate": 0.002, **sections.pop("optimizer", {})},
    )
    return prepared(run_config(values | {"mlperf": {**SUBMISSION, "submission_division": "closed"}} | sections))


def train_twice(world: World, config: RunConfig) -> list[TrainOutcome]:
    return [train_in(world, config, stop_requested=never) for _ in range(2)]


@pytest.fixture(scope="module")
def reached(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """Trains a run to its target on two ranks, and starts it once more."""
    config = mlperf_run(tmp_path_factory.mktemp("reached"))
    outcomes = run_ranks(train_twice, 2, config)[0]
    assert [outcome.state for outcome in outcomes] == ["finished", "finished"]
    assert outcomes[0] == outcomes[1], "a run at its target does not go on"
    assert outcomes[0].step < 60, "it stops before its schedule ends"
    return config


def train_then_raise_the_target(world: World, config: RunConfig) -> list[TrainOutcome]:
    raised = changed(config, training={"target_accuracy": 0.99})
    return [train_in(world, each, stop_requested=never) for each in (config, raised)]


@pytest.mark.slow
def test_a_target_raised_where_no_step_is_left_is_not_reached(reached: RunConfig, tmp_path: Path) -> None:
    last_step = read_metrics(reached.run.output_dir / "metrics.jsonl")[-1]["step"]
    config = changed(reached, run={"output_dir": tmp_path}, training={"stop_after_steps": last_step})
    outcomes = run_ranks(train_then_raise_the_target, 1, config)[0]
    assert outcomes[0].reached_accuracy is not None
    assert outcomes[1] == TrainOutcome(state="finished", step=last_step, reached_accuracy=None)
    target = json.loads((tmp_path / "summary.json").read_text())["target"]
    assert target == {"accuracy": 0.99, "reached": False, "reached_accuracy": None, "samples": None, "seconds": None}


def events(config: RunConfig) -> list[dict[str, Any]]:
    return events_of(config.run.output_dir / "mlperf.log")


def events_of(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in log.read_text().splitlines()]


def last_of(log: Path) -> dict[str, dict[str, Any]]:
    """Returns the last event of each key."""
    return {event["key"]: event for event in events_of(log)}


def test_a_run_stops_at_its_target_with_its_time_and_samples(reached: RunConfig) -> None:
    records = read_metrics(reached.run.output_dir / "metrics.jsonl")
    summary = json.loads((reached.run.output_dir / "summary.json").read_text())
    accuracies = {
        record["step"]: record["validation"]["lines"]["accuracy"] for record in records if "validation" in record
    }
    *before, last = accuracies.items()
    assert last == (records[-1]["step"], summary["target"]["reached_accuracy"])
    assert last[1] >= 0.72
    assert before, "it does not reach the target at once"
    assert all(accuracy < 0.72 for _, accuracy in before)
    assert summary["target"]["reached"]
    assert summary["target"]["samples"] == sum(record["sequences"] for record in records) == records[-1]["samples"]
    seconds = sum(record["step_seconds"] + record.get("evaluation_seconds", 0.0) for record in records)
    assert summary["target"]["seconds"] == pytest.approx(seconds)


def test_the_log_has_true_values_and_passes_mlperfs_checker(reached: RunConfig) -> None:
    records = read_metrics(reached.run.output_dir / "metrics.jsonl")
    log = reached.run.output_dir / "mlperf.log"
    last = last_of(log)
    values = {key: event["value"] for key, event in last.items()}
    assert values["train_samples"] == records[-1]["samples"]
    assert values["eval_samples"] == records[-1]["validation"]["lines"]["sequences"]
    assert values["eval_accuracy"] == pytest.approx(records[-1]["validation"]["lines"]["accuracy"])
    assert values["gradient_accumulation_steps"] == 2
    assert values["opt_base_learning_rate"] == 0.002
    assert values["opt_learning_rate_training_steps"] == 60
    assert values["submission_division"] == "closed"
    assert last["run_stop"]["metadata"]["status"] == "success"
    assert last["run_stop"]["time_ms"] > last["run_start"]["time_ms"]
    passed, said = verdict(log)
    assert passed, said


@pytest.mark.slow
@pytest.mark.parametrize(("division", "passes"), [("closed", False), ("open", True)])
def test_a_run_that_misses_its_target_passes_as_open_and_is_refused_as_closed(
    tmp_path: Path, division: str, passes: bool
) -> None:
    config = mlperf_run(
        tmp_path,
        training={"steps": 2, "evaluate_every_samples": 20},
        optimizer={"learning_rate": 1e-5},
        mlperf={**SUBMISSION, "submission_division": division},
    )
    outcomes = run_ranks(train_twice, 1, config)[0]
    assert [(outcome.state, outcome.reached_accuracy) for outcome in outcomes] == [("finished", None)] * 2
    assert not json.loads((config.run.output_dir / "summary.json").read_text())["target"]["reached"]
    log = config.run.output_dir / "mlperf.log"
    assert last_of(log)["run_stop"]["metadata"]["status"] == "aborted"
    passed, said = verdict(log)
    assert passed == passes, said
    assert passes or "eval_accuracy" in said


def refusals(world: World, stopped: RunConfig) -> list[str]:
    """Returns the errors of a resume, and of a start in a folder that holds a log and no checkpoint.

    Neither adds its start to run.json.
    """
    messages = []
    train_in(world, stopped, stop_requested=never)
    record = stopped.run.output_dir / "run.json"
    before = world.on_main(record.read_bytes)
    for config in (changed(stopped, training={"stop_after_steps": None}), stopped):
        with pytest.raises(RunError) as caught:
            train_in(world, config, stop_requested=never)
        messages.append(str(caught.value))
        assert world.on_main(record.read_bytes) == before
        world.on_main(partial(shutil.rmtree, config.run.output_dir / "checkpoints", ignore_errors=True))
    return messages


def test_a_run_that_was_interrupted_is_not_logged_on(reached: RunConfig, tmp_path: Path) -> None:
    """A log is the only record of a time to train."""
    stopped = changed(
        reached,
        run={"output_dir": tmp_path},
        data={"prepared_dir": reached.prepared_dir},
        training={"stop_after_steps": 1},
    )
    (resumed, begun), of_other_rank = run_ranks(refusals, 2, stopped)
    assert of_other_rank == [resumed, begun]
    assert resumed == begun
    assert "holds a run that has begun" in begun
    assert "mlperf=null" in begun
    assert [event["key"] for event in events(stopped)].count("run_start") == 1
