"""Runs studies for `evenpack study` and for the library, each on its input and devices."""

import os
from collections.abc import Sequence
from pathlib import Path

from evenpack.console import Report
from evenpack.engine.config import RunConfig
from evenpack.launcher.processes.devices import keep_freed_memory, settle_accelerator
from evenpack.launcher.processes.places import ThisMachine
from evenpack.launcher.processes.ranks import RankPlace
from evenpack.launcher.worker import share_cores
from evenpack.studies.lengths.options import SubjectOptions
from evenpack.studies.registry import LengthsStudy, RunStudy, StudyOfRuns


def study_lengths(study: LengthsStudy, lengths: str, overrides: Sequence[str], options: SubjectOptions) -> Report:
    """Runs a study of lengths, which checks its options before the lengths are read."""
    if study.uses_device():
        _settle_device()
    from evenpack.studies.lengths.subject import find_subject

    return study.run(lambda: find_subject(lengths, overrides, options))


def study_run(study: RunStudy, config: RunConfig) -> Report:
    """Runs a study of a prepared run on this rank's share of the machine."""
    share_cores(RankPlace.of_environment(os.environ))  # before torch is imported
    _settle_device()
    return study.run(config)


def _settle_device() -> None:
    """Lets steps of a study run on this machine's device as those of training do."""
    settle_accelerator()
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        keep_freed_memory()


def study_runs(study: StudyOfRuns, study_file: Path, overrides: Sequence[str]) -> Report:
    """Runs a study that trains runs in processes of their own."""
    settle_accelerator()
    return study.run(study_file, overrides, ThisMachine())
