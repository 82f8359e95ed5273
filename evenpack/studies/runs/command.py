"""The command of a study of trained runs; it imports nothing heavy before it is run."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar

import typer

from evenpack.console import Report
from evenpack.studies.shared_options import Plot

if TYPE_CHECKING:
    from evenpack.studies.runs.runner import Machine, RunDevices
    from evenpack.studies.runs.study import TrainedStudy


StudyT = TypeVar("StudyT", bound="TrainedStudy[Any]")


@dataclass(frozen=True, kw_only=True)
class TrainedStudyCommand(ABC, Generic[StudyT]):
    """The options of every study that trains the runs of a study file."""

    devices_per_run: Annotated[
        int | None,
        typer.Option(help="GPUs, or CPU cores, per run; as many runs at once as fit. Default: all for one run."),
    ] = None
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the runs without starting any.")] = False
    only_report: Annotated[
        bool, typer.Option("--only-report", help="Start nothing: report what has finished so far.")
    ] = False
    plot: Plot = None

    @abstractmethod
    def load(self, study_file: Path, overrides: Sequence[str]) -> StudyT:
        """Loads the study. Raises: ConfigError."""

    def run(self, study_file: Path, overrides: Sequence[str], machine: "Machine") -> Report:
        """Runs the study; `overrides`, each `section.key=value`, are for the study file or for every run.

        Raises: ConfigError for an invalid study or option, before anything is started; RunError, DataError.
        """
        study = self.load(study_file, overrides)
        if self.dry_run:
            return self.describe(study, machine.device_groups(self.devices_per_run))
        return study.run(machine, devices_per_run=self.devices_per_run, only_report=self.only_report, plot=self.plot)

    def describe(self, study: StudyT, groups: "Sequence[RunDevices]") -> Report:
        """Lists the runs for `--dry-run`. Raises: ConfigError."""
        return study.describe(groups)
