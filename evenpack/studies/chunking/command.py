"""The command `evenpack study chunking`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from evenpack.studies.runs.command import TrainedStudyCommand


@dataclass(frozen=True, kw_only=True)
class ChunkingCommand(TrainedStudyCommand):
    """Train the same model on one corpus that is chunked in different ways, and compare perplexities.

    A study file lists arms, or a grid of them: recipes, lengths, atoms. Missing data is prepared first. Each finished
    run is evaluated on held-out documents. The same command resumes an interrupted study; a run that fails does not
    stop the others.

    \b
    Examples:
      evenpack study chunking studies/atom_size_gpt2_124m --dry-run
      evenpack study chunking STUDY.yaml --devices-per-run 1 --plot figures/ --save found.json
      evenpack study chunking STUDY.yaml study.output_dir=runs/other training.epochs=1
    """

    study: ClassVar[str] = "ChunkingStudy"
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FOLDER", help="Also draw a figure per length into this folder.")
    ] = None
