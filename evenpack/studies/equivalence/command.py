"""The command `evenpack study equivalence`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from evenpack.console import Report
from evenpack.studies.shared_options import DevicesPerRun, DryRun, OnlyReport, Plot

if TYPE_CHECKING:
    from evenpack.studies.runs.machine import Machine


@dataclass(frozen=True, kw_only=True)
class EquivalenceCommand:
    """Train arms of a study file side by side, and test whether they learn the same.

    Each arm is a few settings on a run file, trained with several seeds. Missing data is prepared first. The same
    command resumes an interrupted study; a run that fails does not stop the others.

    \b
    Examples:
      evenpack study equivalence studies/equivalence_mini --dry-run
      evenpack study equivalence STUDY.yaml --devices-per-run 1 --plot arms.png --save arms.json
      evenpack study equivalence STUDY.yaml study.output_dir=runs/other training.steps=500
    """

    devices_per_run: DevicesPerRun = None
    dry_run: DryRun = False
    only_report: OnlyReport = False
    plot: Plot = None

    def run(self, study_file: Path, overrides: Sequence[str], machine: "Machine") -> Report:
        """Runs the study. Raises: ConfigError for an invalid study or option, before anything is started."""
        from evenpack.studies.equivalence.study import describe_study, run_study

        if self.dry_run:
            return describe_study(study_file, overrides, machine, devices_per_run=self.devices_per_run)
        return run_study(
            study_file,
            overrides,
            machine,
            devices_per_run=self.devices_per_run,
            only_report=self.only_report,
            plot=self.plot,
        )
