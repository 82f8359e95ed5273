"""The runs of a study that are compared: those that have finished, of one phase or of all."""

import json
from pathlib import Path
from typing import Any

import pytest
from study_files import FakeMachine, write_study

from evenpack.engine.reporting.run_record import RUN_RECORD, DataIdentity, RunRecord, StartRecord
from evenpack.studies.equivalence.config import EquivalenceConfig
from evenpack.studies.runs.jobs import StudyRun, expand
from evenpack.studies.runs.runner import EndedRun, RunResult
from evenpack.studies.runs.study import Findings, TrainedStudy, finished_runs
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


class Study(TrainedStudy[EquivalenceConfig]):
    """Compares nothing."""

    def reference_of(self, arm: str) -> str:
        return self.study.equivalence.reference

    def compare(self, runs: Any, ended: Any) -> Findings:
        return Findings(value={}, shown=[], draw=lambda path, origin: [])


@pytest.mark.parametrize(
    ("recorded", "expected"),
    [
        (["a", "b"], {"devices": ["2 x H100"], "commit": "a, b", "date": "2026-11-21 to 2026-11-22", "torch": "2.1"}),
        (["b", "b"], {"devices": ["2 x H100"], "commit": "b", "date": "2026-11-22", "evenpack": "0.1"}),
        (["b", None], {"devices": ["2 x H100", "not recorded"], "commit": "b, not recorded", "date": "2026-11-22"}),
        ([None], dict.fromkeys(["processor", "evenpack", "torch", "commit", "date"], "not recorded")),
    ],
)
def test_what_is_reported_later_was_measured_where_the_runs_were(
    tmp_path: Path, recorded: list[str | None], expected: dict[str, Any]
) -> None:
    """The process that reports may run another commit on another machine."""
    study = Study(EquivalenceConfig, write_study(tmp_path), ())
    for run, commit in zip(study.runs, recorded, strict=False):
        RunResult(state="finished", message="", config=run.config.model_dump(mode="json")).write(run.output_dir)
        if commit is not None:
            write_record(run, commit, date="2026-11-21" if commit == "a" else "2026-11-22")
    report = study.run(FakeMachine(), devices_per_run=None, only_report=True, plot=None)
    measured_on = report.value["measured_on"]
    assert list(measured_on) == ["devices", "processor", "evenpack", "torch", "commit", "date"]
    assert expected.items() <= measured_on.items()
    assert "Run the same command without --only-report to continue them." in str(report.shown[-1])


def write_record(run: StudyRun, commit: str, *, date: str) -> None:
    data = DataIdentity(fingerprint="f", tokenizer="t", vocabulary_size=256, pack_length=64, sources=("wiki",))
    start = StartRecord(first_step=0, ranks=2, device="H100", commit=commit, evenpack="0.1", torch="2.1", date=date)
    record = RunRecord(config={"run": {"name": "one"}}, data=data, starts=(start,))
    (run.output_dir / RUN_RECORD).write_text(record.model_dump_json())


def test_what_arms_differ_in_beyond_their_settings_is_listed(tmp_path: Path) -> None:
    """An arm that replaces a section also gives up what the run file says there."""
    arms = {
        "unpacked": {"training.layout": "padded"},
        "packed": {},
        "slower": {"optimizer": {"kind": "adamw", "learning_rate": 1e-5}},
        "other_kind": {"data.recipe": {"kind": "concat", "max_sequence_length": 16}, "data.pack_length": 16},
    }
    phase = {"base": "base.yaml", "seeds": [1, 2], "arms": arms}
    phase["settings"] = {"optimizer.weight_decay": 0.7, "data.recipe.minimum_document_length": 5}
    study = Study(EquivalenceConfig, write_study(tmp_path, phases={"only": phase}), ())
    assert study.unnamed == {
        "slower": {"optimizer.weight_decay": (0.7, 0.1)},
        "other_kind": {"data.recipe.minimum_document_length": (5, 2)},
    }
    assert [str(line) for line in study.warnings()] == [
        "Warning: arm slower differs from unpacked in what neither names: optimizer.weight_decay (0.1, there 0.7)",
        "Warning: arm other_kind differs from unpacked in what neither names: "
        "data.recipe.minimum_document_length (2, there 5)",
    ]
