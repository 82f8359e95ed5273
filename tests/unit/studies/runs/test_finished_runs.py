"""The runs of a study that are compared: those that have finished, of one phase or of all."""

import json
from pathlib import Path

from study_files import write_study

from evenpack.studies.equivalence.config import EquivalenceConfig
from evenpack.studies.runs.jobs import StudyRun, expand
from evenpack.studies.runs.runner import EndedRun
from evenpack.studies.runs.study import finished_runs
from evenpack.studies.runs.study_file import load_study


def runs_of(folder: Path) -> list[StudyRun]:
    study, words = load_study(write_study(folder), EquivalenceConfig, ())
    runs = list(expand(study, words))
    for run in runs:
        run.output_dir.mkdir(parents=True)
        (run.output_dir / "summary.json").write_text(json.dumps({"ranks": 2, "device": "cpu"}))
    return runs


def test_finished_runs_are_those_of_the_phase(tmp_path: Path) -> None:
    runs = runs_of(tmp_path)
    states = ["finished", "finished", "failed", "unfinished", "finished"]
    ended = [EndedRun(run=run, state=state, message="") for run, state in zip(runs, states, strict=True)]  # type: ignore[arg-type]
    assert finished_runs(ended, "second") == [runs[1], runs[4]]
    assert finished_runs(ended) == [runs[0], runs[1], runs[4]]
