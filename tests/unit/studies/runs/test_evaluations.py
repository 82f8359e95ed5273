"""Evaluations follow the runs of a study: each once its run has finished, and never twice."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from study_files import FakeMachine, end_jobs, write_study

from evenpack.studies.equivalence.config import EquivalenceConfig
from evenpack.studies.runs.arms import difference_from, loss_of_evaluation
from evenpack.studies.runs.jobs import Evaluation, Job, evaluation_of, expand, interleaved
from evenpack.studies.runs.study_file import load_study

CUTS = {"kind": "concat", "max_sequence_length": 16}


def jobs_of(path: Path) -> tuple[Job, ...]:
    """Runs, and evaluations of those of the second phase on cuts of 16 tokens."""
    study, overrides = load_study(path, EquivalenceConfig, ())
    runs = expand(study, overrides)
    place = study.study.output_dir
    second = [run for run in runs if run.phase == "second"]
    return interleaved(runs, [evaluation_of(run, "cuts", {"data.recipe": CUTS}, study_dir=place) for run in second])


def test_a_run_is_evaluated_as_soon_as_it_has_finished(tmp_path: Path) -> None:
    machine = FakeMachine()
    ended = end_jobs(jobs_of(write_study(tmp_path)), machine)
    assert [one.state for one in ended.values()] == ["finished"] * 9
    assert [call.command for call in machine.calls] == ["prepare"] * 2 + ["train"] + ["train", "evaluate"] * 4
    trained_on, evaluated_on = (call.overrides["data.prepared_dir"] for call in machine.calls[:2])
    assert trained_on != evaluated_on
    last = machine.calls[-1].overrides
    assert (last["data.recipe"], last["data.prepared_dir"]) == (CUTS, evaluated_on)
    run = tmp_path / "study/second/packed/seed_2"
    assert last["run.output_dir"] == str(run), "where the checkpoint lies"
    assert machine.calls[-1].options == ("--save", str(run / "held_out/cuts/evaluation.json"))
    assert {call.options for call in machine.calls if call.command != "evaluate"} == {()}


def test_evaluations_that_are_done_are_not_repeated_and_those_that_failed_are(tmp_path: Path) -> None:
    path = write_study(tmp_path)
    ended = end_jobs(jobs_of(path), FakeMachine(codes={"evaluate": 2}))
    failed = [one for one in ended.values() if one.state == "failed"]
    assert len(failed) == 4
    assert all(isinstance(one.run, Evaluation) for one in failed), "the runs themselves have finished"
    assert failed[0].message.startswith("there is no such\nthing")
    machine = FakeMachine()
    assert {one.state for one in end_jobs(jobs_of(path), machine).values()} == {"finished"}
    assert [call.command for call in machine.calls] == ["evaluate"] * 4
    machine = FakeMachine()
    end_jobs(jobs_of(path), machine)
    assert machine.calls == []


def test_a_run_that_failed_is_not_evaluated(tmp_path: Path) -> None:
    machine = FakeMachine(codes={"second/packed/seed_1": 1})
    ended = end_jobs(jobs_of(write_study(tmp_path)), machine)
    assert ended["second/packed/seed_1/held_out/cuts"].state == "failed"
    assert [call.command for call in machine.calls].count("evaluate") == 3


@pytest.mark.parametrize(
    ("sources", "loss"),
    [
        ({"wiki": {"loss": 2.0, "targets": 10}, "code": {"loss": 5.0, "targets": 20}}, 4.0),
        ({"wiki": {"loss": 2.0, "targets": 10}, "code": {"loss": None, "targets": 20}}, math.inf),
        ({"wiki": {"loss": 2.0, "targets": 10}, "code": {"loss": None, "targets": 0}, "more": None}, 2.0),
        ({"wiki": None, "code": {"loss": None, "targets": 0}}, None),
    ],
)
def test_a_loss_that_was_not_finite_is_infinite_and_has_no_difference(
    tmp_path: Path, sources: dict[str, Any], loss: float | None
) -> None:
    evaluation = next(job for job in jobs_of(write_study(tmp_path)) if isinstance(job, Evaluation))
    evaluation.output_dir.mkdir(parents=True)
    evaluation.result.write_text(json.dumps({"sources": sources, "data": None}))
    assert loss_of_evaluation(evaluation) == loss
    found = difference_from({1: 1.0, 2: 2.0}, {1: 1.5, 2: loss}, lambda one: one, significance=0.05)
    assert (found is None) == (loss == math.inf)
