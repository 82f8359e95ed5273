"""The command `evenpack study equivalence`."""

from dataclasses import dataclass
from typing import ClassVar

from evenpack.studies.runs.command import TrainedStudyCommand


@dataclass(frozen=True, kw_only=True)
class EquivalenceCommand(TrainedStudyCommand):
    """Train arms of a study file side by side, and test whether they learn the same.

    Each arm is a few settings on a run file, trained with several seeds. Missing data is prepared first. The same
    command resumes an interrupted study; a run that fails does not stop the others.

    \b
    Examples:
      evenpack study equivalence studies/equivalence_mini --dry-run
      evenpack study equivalence STUDY.yaml --devices-per-run 1 --plot arms.png --save arms.json
      evenpack study equivalence STUDY.yaml study.output_dir=runs/other training.steps=500
    """

    study: ClassVar[str] = "EquivalenceStudy"
