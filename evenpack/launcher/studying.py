"""Runs studies for `evenpack study` and for the library, each on its input and devices."""

import os
from collections.abc import Sequence
from pathlib import Path

from evenpack.console import Report
from evenpack.engine.config import RunConfig
from evenpack.launcher.processes.devices import settle_accelerator
from evenpack.launcher.processes.places import ThisMachine
from evenpack.launcher.processes.ranks import RankPlace
from evenpack.launcher.worker import share_cores
from evenpack.studies.lengths.options import SubjectOptions
from evenpack.studies.registry import LengthsStudy, RunStudy, StudyOfRuns


def study_lengths(study: LengthsStudy, lengths: str, overrides: Sequence[str], options: SubjectOptions) -> Report:
    """Runs a study of lengths, which checks its options before the lengths are read."""
    from evenpack.studies.lengths.subject import find_subject

    return study.run(lambda: find_subject(lengths, overrides, options))


def study_run(study: RunStudy, config: RunConfig) -> Report:
    """Runs a study of a prepared run on this rank's share of the machine."""
    share_cores(RankPlace.of_environment(os.environ))  # before torch is imported
    settle_accelerator()
    return study.run(config)


def study_runs(study: StudyOfRuns, study_file: Path, overrides: Sequence[str]) -> Report:
    """Runs a study that trains runs in processes of their own."""
    settle_accelerator()
    return study.run(study_file, overrides, ThisMachine())
