"""The runs of a study that are compared, which are those of the last phase that have finished, and their provenance."""

from pathlib import Path
from typing import Any, Literal

import pytest
from run_records import run_record, start
from study_files import FakeMachine, write_study

from evenpack.engine.reporting.run_record import RUN_RECORD
from evenpack.studies.equivalence.config import EquivalenceConfig
from evenpack.studies.runs.jobs import StudyRun
from evenpack.studies.runs.runner import RunResult
from evenpack.studies.runs.study import Findings, RunsByArm, TrainedStudy


class Study(TrainedStudy[EquivalenceConfig]):
    """Compares nothing."""

    def reference_of(self, arm: str) -> str:
        return self.study.equivalence.reference

    def compare(self, runs: RunsByArm, ended: Any) -> Findings:
        self.found = [run.key for of_seed in runs.values() for run in of_seed.values()]
        return Findings(value={}, shown=[], draw=lambda path, origin: [])


def test_the_runs_that_are_compared_are_those_of_the_last_phase_that_have_finished(tmp_path: Path) -> None:
    study = Study(EquivalenceConfig, write_study(tmp_path), ())
    finish(study.runs[0])
    finish(study.runs[1])
    finish(study.runs[2], "failed")
    finish(study.runs[4])
    study.run(FakeMachine(), devices_per_run=None, only_report=True, plot=None)
    assert sorted(study.found) == sorted([study.runs[1].key, study.runs[4].key])


def finish(run: StudyRun, state: Literal["finished", "failed"] = "finished") -> None:
    RunResult(state=state, message="", config=run.config.model_dump(mode="json")).write(run.output_dir)


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
        finish(run)
        if commit is not None:
            ran = start(commit=commit, torch="2.1", date="2026-11-21" if commit == "a" else "2026-11-22")
            (run.output_dir / RUN_RECORD).write_text(run_record(ran).model_dump_json())
    report = study.run(FakeMachine(), devices_per_run=None, only_report=True, plot=None)
    measured_on = report.value["measured_on"]
    assert list(measured_on) == ["devices", "processor", "evenpack", "torch", "commit", "date"]
    assert expected.items() <= measured_on.items()


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
    assert len(study.warnings()) == 2
