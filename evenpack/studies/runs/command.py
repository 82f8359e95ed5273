"""The command of a study of trained runs; it imports nothing heavy before it is run."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from evenpack.console import Report
from evenpack.studies.shared_options import Plot

if TYPE_CHECKING:
    from evenpack.studies.runs.runner import Machine
    from evenpack.studies.runs.study import TrainedStudy


@dataclass(frozen=True, kw_only=True)
class TrainedStudyCommand:
    """The options of every study that trains the runs of a study file."""

    study: ClassVar[str]
    """The class of the study, in `study.py` beside the command."""
    devices_per_run: Annotated[
        int | None,
        typer.Option(help="GPUs, or CPU cores, per run; as many runs at once as fit. Default: all for one run."),
    ] = None
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the runs without starting any.")] = False
    only_report: Annotated[
        bool, typer.Option("--only-report", help="Start nothing: report what has finished so far.")
    ] = False
    plot: Plot = None

    def load(self, study_file: Path, overrides: Sequence[str]) -> "TrainedStudy[Any]":
        """Loads the study. Raises: ConfigError."""
        module = importlib.import_module(type(self).__module__.replace(".command", ".study"))
        return getattr(module, self.study)(study_file, overrides)

    def run(self, study_file: Path, overrides: Sequence[str], machine: "Machine") -> Report:
        """Runs the study; `overrides`, each `section.key=value`, are for the study file or for every run.

        Raises: ConfigError for an invalid study or option, before anything is started; RunError, DataError.
        """
        study = self.load(study_file, overrides)
        if self.dry_run:
            return study.describe(machine.device_groups(self.devices_per_run))
        return study.run(machine, devices_per_run=self.devices_per_run, only_report=self.only_report, plot=self.plot)
