"""The command `evenpack study chunking`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evenpack.console import Report
from evenpack.studies.runs.command import TrainedStudyCommand

if TYPE_CHECKING:
    from evenpack.studies.chunking.study import ChunkingStudy
    from evenpack.studies.runs.runner import RunDevices


@dataclass(frozen=True, kw_only=True)
class ChunkingCommand(TrainedStudyCommand["ChunkingStudy"]):
    """Train the same model on one corpus that is chunked in different ways, and compare perplexities.

    A study file lists arms, or a grid of them: recipes, lengths, atoms. Missing data is prepared first. Each finished
    run is evaluated on held-out documents. The same command resumes an interrupted study; a run that fails does not
    stop the others.

    \b
    Examples:
      evenpack study chunking studies/atom_size_gpt2_124m --dry-run --device a100
      evenpack study chunking STUDY.yaml --devices-per-run 1 --plot figures/ --save found.json
      evenpack study chunking STUDY.yaml study.output_dir=runs/other training.epochs=1
    """

    corpus_tokens: Annotated[
        int | None, typer.Option(min=1, help="With --dry-run and unprepared data: an epoch's tokens.")
    ] = None
    corpus_documents: Annotated[
        int | None, typer.Option(min=1, help="Documents of --corpus-tokens, each with an end-of-text token.")
    ] = None
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="With --dry-run: hours on this device, h100, a100, ...")
    ] = None
    mfu: Annotated[float, typer.Option(help="With --device: fraction of its peak that useful operations reach.")] = 0.4
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FOLDER", help="Also draw a figure per length into this folder.")
    ] = None

    def load(self, study_file: Path, overrides: Sequence[str]) -> "ChunkingStudy":
        from evenpack.studies.chunking.study import ChunkingStudy

        return ChunkingStudy(study_file, overrides)

    def describe(self, study: "ChunkingStudy", groups: "Sequence[RunDevices]") -> Report:
        from evenpack.studies.budget.options import BudgetOptions

        options = BudgetOptions(
            devices=groups[0].ranks,
            device=self.device,
            mfu=self.mfu,
            corpus_tokens=self.corpus_tokens,
            corpus_documents=self.corpus_documents,
        )
        options.require_valid(has_run=True)
        return study.describe_with_budgets(groups, options)
