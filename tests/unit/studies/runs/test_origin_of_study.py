"""The line below a study's figures."""

import json
from pathlib import Path

from study_files import write_study

from evenpack.engine.reporting.run_record import RUN_RECORD, DataIdentity, RunRecord, Start
from evenpack.studies.equivalence.config import EquivalenceConfig
from evenpack.studies.runs.jobs import StudyRun, expand
from evenpack.studies.runs.runner import EndedRun
from evenpack.studies.runs.study import finished_runs, origin_of_study
from evenpack.studies.runs.study_file import load_study


def runs_of(folder: Path) -> list[StudyRun]:
    study, words = load_study(write_study(folder), EquivalenceConfig, ())
    runs = list(expand(study, words))
    for run in runs:
        run.output_dir.mkdir(parents=True)
        (run.output_dir / "summary.json").write_text(json.dumps({"ranks": 2, "device": "cpu"}))
    return runs


def test_a_study_is_of_the_data_commits_and_devices_that_its_runs_recorded(tmp_path: Path) -> None:
    runs = runs_of(tmp_path)
    for run, commit in zip(runs[1:3], ("abc", "def"), strict=True):
        data = DataIdentity(fingerprint="f" * 32, tokenizer="t", vocabulary_size=9, pack_length=8, sources=("text",))
        start = Start(first_step=0, ranks=4, device="H100", commit=commit, evenpack="0.1", torch="2", date="")
        record = RunRecord(config={"run": {"name": "x"}}, data=data, starts=(start,))
        (run.output_dir / RUN_RECORD).write_text(record.model_dump_json())
    assert origin_of_study("small", runs[1:4]) == (
        "small: data text (ffffffffffff); evenpack 0.1, commits abc, def; 4 x H100; 1 of 3 runs have no record"
    )


def test_without_records_the_settings_and_summaries_say_what_they_can(tmp_path: Path) -> None:
    runs = runs_of(tmp_path)
    sources = ", ".join(runs[0].config.data.sources)
    assert origin_of_study("small", runs) == f"small: data {sources}; commit not recorded; 2 x cpu"


def test_finished_runs_are_those_of_the_phase(tmp_path: Path) -> None:
    runs = runs_of(tmp_path)
    states = ["finished", "finished", "failed", "unfinished", "finished"]
    ended = [EndedRun(run=run, state=state, message="") for run, state in zip(runs, states, strict=True)]  # type: ignore[arg-type]
    assert finished_runs(ended, "second") == [runs[1], runs[4]]
    assert finished_runs(ended) == [runs[0], runs[1], runs[4]]
