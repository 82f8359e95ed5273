"""Evaluation of a checkpoint on the held-out documents, for `evenpack evaluate` and the library."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import RenderableType

from evenpack.data.prepare.verification import explained_damage
from evenpack.data.prepared import Split
from evenpack.engine.config import RunConfig
from evenpack.engine.evaluate import SourceEvaluation, aggregate_loss, evaluate_model
from evenpack.launcher import views
from evenpack.launcher.evaluation_file import run_over_text
from evenpack.launcher.processes.devices import settle_accelerator
from evenpack.launcher.trained import StepOrBest, load_trained_model


@dataclass(frozen=True, kw_only=True)
class RunEvaluation:
    """The evaluation of a checkpoint on the held-out documents."""

    checkpoint: Path
    step: int
    """Optimizer updates after which it was saved."""
    data: Path | None
    """The file, folder or pattern that it was evaluated on; None: the held-out documents of the run's sources."""
    sources: dict[str, SourceEvaluation | None]
    """Every source, or those of the files, by name; None: nothing is held out."""
    aggregate: dict[str, Any] | None
    """The mean of the sources' losses by `training.validation_weights`, and these; None without weights."""

    def to_json(self) -> dict[str, Any]:
        """Returns the values for JSON; data and aggregate are left out where there are none."""
        sources = {name: None if found is None else found.to_json() for name, found in self.sources.items()}
        aggregate = {} if self.aggregate is None else {"aggregate": self.aggregate}
        data = {} if self.data is None else {"data": self.data}
        return {"checkpoint": self.checkpoint, "step": self.step, **data, "sources": sources, **aggregate}


def evaluate_run(config: RunConfig, *, step: StepOrBest = None, data: Path | None = None) -> RunEvaluation:
    """Evaluates the run's newest complete checkpoint, or that after `step` steps, or the best, in this process.

    It takes the GPU if there is one. `data` is a file, folder or pattern of text, all of which replaces the held-out
    documents.

    Raises: as `load_trained_model`; DataError for validation weights of a source that holds nothing out; and see
    `run_over_text`.
    """
    settle_accelerator()
    if data is None:
        return _evaluate(config, step=step, split="validation", data=None)
    with run_over_text(config, data) as over_file:
        return _evaluate(over_file, step=step, split="train", data=data)


def _evaluate(config: RunConfig, *, step: StepOrBest, split: Split, data: Path | None) -> RunEvaluation:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with explained_damage(config.prepared_dir):
        trained = load_trained_model(config, device, step=step)
        evaluations = evaluate_model(trained.model, trained.run, trained.world, split=split)
    return RunEvaluation(
        checkpoint=trained.checkpoint.path,
        step=trained.checkpoint.step,
        data=data,
        sources={name: evaluations.get(name) for name in trained.run.prepared.source_names},
        aggregate=aggregate_loss(evaluations, config.training.validation_weights),
    )


def describe_evaluation(found: RunEvaluation) -> tuple[dict[str, Any], list[RenderableType]]:
    """Returns an evaluation as a value for JSON and as rich tables."""
    value = found.to_json()
    place = "" if found.data is None else f", on {found.data}"
    shown: list[RenderableType] = [views.evaluation_table(value["sources"], title=f"After step {found.step:,}{place}")]
    if found.aggregate is not None:
        shown.append(views.aggregate_line(found.aggregate))
    return value, shown
