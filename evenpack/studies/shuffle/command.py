"""The command `evenpack study shuffle`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from evenpack.console import Report
from evenpack.studies.shared_options import DevicesPerRun, DryRun, OnlyReport, Plot

if TYPE_CHECKING:
    from evenpack.studies.runs.machine import Machine


@dataclass(frozen=True, kw_only=True)
class ShuffleCommand:
    """Compare ways of shuffling a corpus: how random the order is, how fast it is read, and how the loss behaves.

    Each arm of the study file sets data.shuffle; its order is compared with a rolling buffer and with no shuffle, its
    data is read, and a model is trained on it. The same command resumes an interrupted study.

    \b
    Examples:
      evenpack study shuffle studies/shuffle_mini --dry-run
      evenpack study shuffle STUDY.yaml --devices-per-run 1 --plot shuffle.png --save shuffle.json
    """

    devices_per_run: DevicesPerRun = None
    dry_run: DryRun = False
    only_report: OnlyReport = False
    plot: Plot = None

    def run(self, study_file: Path, overrides: Sequence[str], machine: "Machine") -> Report:
        """Runs the study. Raises: ConfigError for an invalid study or option, before anything is started."""
        from evenpack.studies.shuffle.study import describe_study, run_study

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
