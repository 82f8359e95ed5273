"""Every reader of metrics.jsonl reads a log with skipped steps, and finds in it what it finds in the trained ones."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from run_files import run_config, run_values

from evenpack.data.batches.pipeline import SkippedStep
from evenpack.engine.build import Start
from evenpack.engine.parts.metrics_writer import skipped_record
from evenpack.engine.parts.trackers import CSV_TABLE, CsvMetrics
from evenpack.engine.reporting.metrics import METRICS, find_record, read_metrics, save_totals
from evenpack.engine.reporting.summary import computed_alike
from evenpack.errors import DataError
from evenpack.losses import StepCounts
from evenpack.studies.chunking.curves import read_curve as read_chunking_curve
from evenpack.studies.equivalence.compare import read_curve as read_equivalence_curve
from evenpack.studies.imbalance.measurement import read_logged_run
from evenpack.studies.report import read_runs
from evenpack.studies.runs.jobs import steps_done

STEPS = 100
LEFT_OUT = {
    "the first": [1],
    "the last": [STEPS],
    "many, an evaluation's among them": [1, 2, 50, *range(91, STEPS + 1)],
}
LOSS, NEXT_SENTENCE_LOSS = 2.0, 0.5


def trained_record(step: int) -> dict[str, Any]:
    """Returns a step of a model with two losses; all steps are alike."""
    return {
        "step": step,
        "loss": LOSS + NEXT_SENTENCE_LOSS,
        "token_loss": LOSS,
        "next_sentence_loss": NEXT_SENTENCE_LOSS,
        "optimised_next_sentence_loss": NEXT_SENTENCE_LOSS,
        "learning_rate": 1e-3,
        "tokens": 300,
        "targets": 60,
        "slots": 320,
        "sequences": 10,
        "host_to_device_bytes": 1000,
        "order_hash": "00000000000000ff",
        "world_size": 2,
        "step_seconds": 0.5,
        "tokens_per_second": 600.0,
        "compute_seconds_mean": 0.3,
        "compute_seconds_max": 0.4,
        "ranks": {"steps": 1, "compute_seconds": [0.2, 0.4]},
    }


def left_out_record(step: int) -> dict[str, Any]:
    """Returns what the journal writes of a step that `training.skip_steps` names or `on_nan: skip` leaves out."""
    counts = StepCounts(packs=8, sequences=10, tokens=300, targets=60)
    record = skipped_record(SkippedStep(step=step - 1, counts=counts), ["text"], learning_rate=1e-3)
    return record | {"ranks": {"steps": 0, "compute_seconds": [0.0, 0.0]}}


def write_log(folder: Path, left_out: list[int]) -> Path:
    """Writes a log with an evaluation every tenth step, skipped ones included."""
    folder.mkdir(parents=True, exist_ok=True)
    records = [left_out_record(step) if step in left_out else trained_record(step) for step in range(1, STEPS + 1)]
    for record in records[9::10]:
        record["validation"] = {
            "text": {"loss": 3.0, "accuracy": 0.25, "targets": 6, "next_sentence_accuracy": 0.5, "sequences": 3}
        }
    (folder / METRICS).write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def chunking(folder: Path) -> Any:
    found = read_chunking_curve(folder)
    return (
        found.steps,
        found.segments(2.0).tolist(),
        found.final(2.0),
        found.at_step(STEPS, 2.0),
        found.tokens_per_step,
        found.slots_per_step,
        found.own_loss,
    )


def equivalence(folder: Path) -> Any:
    found = read_equivalence_curve(folder)
    return (
        *(found.loss, found.accuracy, found.next_sentence_accuracy, found.training_loss),
        *(found.sequences_per_step, found.slots_per_sequence, found.host_to_device_bytes_per_sequence),
    )


def report(folder: Path) -> Any:
    (run,) = read_runs([folder])
    course = run.course
    means = [float(np.nanmean(values)) for values in (course.loss, course.tokens_per_second)]
    shares = course.tokens[-1] / course.seconds[-1], run.predicts_masked_tokens, run.tokens_per_step
    return means, shares, [points.tolist() for points in course.validation["text"]]


def imbalance(folder: Path) -> Any:
    found = read_logged_run(folder / METRICS).log
    return set(found.rates.tolist()), found.devices, found.sequences_per_step, pytest.approx(found.wait_share)


def summary(folder: Path) -> Any:
    records = read_metrics(folder / METRICS)
    trained = [record for record in records if "skipped" not in record]
    same = {json.dumps({**record, "step": 0, "validation": None}) for record in computed_alike(trained)}
    return len(records), same, save_totals(records, [])


def other_log_functions(folder: Path) -> Any:
    """Of the resumed run: the records that `where` looks up."""
    path = folder / METRICS
    found = [find_record(path, step=step) for step in (1, 50, STEPS)]
    return [record and record["step"] for record in found]


def csv_table(folder: Path) -> Any:
    config = run_config(run_values("gpt2", folder, run={"output_dir": str(folder)}))
    run = object.__new__(Start)
    object.__setattr__(run, "resolved", SimpleNamespace(config=config))
    CsvMetrics(run).close(failed=False)
    head, *lines = (folder / CSV_TABLE).read_text().splitlines()
    assert {line.count(",") for line in lines} == {head.count(",")}
    return len(lines)


READERS: list[Callable[[Path], Any]] = [
    *(chunking, equivalence, report, imbalance, summary, other_log_functions, csv_table),
    steps_done,
]


@pytest.mark.parametrize("name", LEFT_OUT)
@pytest.mark.parametrize("read", READERS, ids=lambda read: read.__name__)
def test_skipped_steps_change_no_mean(read: Callable[[Path], Any], name: str, tmp_path: Path) -> None:
    without = read(write_log(tmp_path / "without", []))
    found = read(write_log(tmp_path / "with", LEFT_OUT[name]))
    assert found == without


@pytest.mark.parametrize(
    ("left_out", "expected"), [([1, 2], [3, 3, 3, 4]), ([2, 3], [1, 1, 1, 4]), ([4], [1, 2, 3, 3])]
)
def test_a_skipped_step_has_the_perplexity_of_the_step_before_it(
    left_out: list[int], expected: list[int], tmp_path: Path
) -> None:
    records = [left_out_record(step) if step in left_out else trained_record(step) for step in range(1, 5)]
    for record in records:
        record["loss"] = None if "skipped" in record else float(record["step"])
    (tmp_path / METRICS).write_text("".join(json.dumps(record) + "\n" for record in records))
    assert read_chunking_curve(tmp_path).losses.tolist() == expected


@pytest.mark.parametrize("where", ["in training", "in the evaluation"])
def test_a_run_that_has_diverged_is_not_compared(where: str, tmp_path: Path) -> None:
    """What is not finite is null in the log."""
    folder = write_log(tmp_path, [])
    records = read_metrics(folder / METRICS)
    changed = records[-1] if where == "in training" else records[-1]["validation"]["text"]
    changed["loss"] = None
    (folder / METRICS).write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(DataError, match="has diverged and cannot be compared"):
        read_equivalence_curve(folder)


@pytest.mark.parametrize("read", [read_chunking_curve, read_equivalence_curve], ids=["chunking", "equivalence"])
def test_a_run_without_a_trained_step_has_no_curve(read: Callable[[Path], Any], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"all 100 steps in .* were skipped"):
        read(write_log(tmp_path, list(range(1, STEPS + 1))))
