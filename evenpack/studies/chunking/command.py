"""The command `evenpack study chunking`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evenpack.console import Report
from evenpack.studies.plan.options import PlanOptions
from evenpack.studies.runs.command import TrainedStudyCommand

if TYPE_CHECKING:
    from evenpack.studies.chunking.study import ChunkingStudy
    from evenpack.studies.runs.runner import RunDevices


@dataclass(frozen=True, kw_only=True)
class ChunkingCommand(TrainedStudyCommand["ChunkingStudy"], PlanOptions):
    """Train the same model on one corpus that is chunked in different ways, and compare perplexities.

    A study file lists arms, or a grid of them: recipes, lengths, atoms. Missing data is prepared first. Each finished
    run is evaluated on held-out documents. The same command resumes an interrupted study; a run that fails does not
    stop the others. --device, --mfu and what is known of unprepared data are for the plans of --dry-run.

    \b
    Examples:
      evenpack study chunking studies/atom_size_gpt2_124m --dry-run --device a100
      evenpack study chunking STUDY.yaml --devices-per-run 1 --plot figures/ --save found.json
      evenpack study chunking STUDY.yaml study.output_dir=runs/other training.epochs=1
    """

    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FOLDER", help="Also draw a figure per length into this folder.")
    ] = None

    def load(self, study_file: Path, overrides: Sequence[str]) -> "ChunkingStudy":
        from evenpack.studies.chunking.study import ChunkingStudy

        return ChunkingStudy(study_file, overrides)

    def describe(self, study: "ChunkingStudy", groups: "Sequence[RunDevices]") -> Report:
        self.require_valid()
        return study.describe_with_plans(groups, self)
