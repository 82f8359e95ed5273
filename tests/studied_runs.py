"""The study of waiting on a run's file, in this process."""

from typing import Any

from run_files import write_run_file

from evenpack.engine.config import RunConfig
from evenpack.studies.imbalance.command import ImbalanceCommand
from evenpack.studies.imbalance.study import ImbalanceStudy, run_study
from evenpack.studies.lengths.options import SubjectOptions
from evenpack.studies.lengths.subject import find_subject

QUICK: dict[str, Any] = {"steps": 30, "devices": "1,2"}


def studied(config: RunConfig, *overrides: str, **given: Any) -> ImbalanceStudy:
    """The study of a run's file."""
    path = config.run.output_dir.with_suffix(".yaml")
    write_run_file(path, config.model_dump(mode="json"))
    return run_study(ImbalanceCommand(**QUICK | given), lambda: find_subject(str(path), overrides, SubjectOptions()))
