"""Runs the study of throughput on this process's ranks."""

from pathlib import Path

from evenpack import console
from evenpack.console import Report
from evenpack.engine.config import RunConfig
from evenpack.engine.world.distributed import configure_logging, joined_world
from evenpack.progress import Piece, Progress
from evenpack.studies.throughput.plots import plot_throughput
from evenpack.studies.throughput.study import (
    ThroughputOptions,
    study_throughput,
)
from evenpack.studies.throughput.tables import throughput_tables


class StepProgress:
    """Shows the steps done, and the current measurement; fewer steps, or another total, begin a new bar."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._steps: Piece | None = None
        self._done = self._total = 0
        self._called_at = progress.clock()

    def __call__(self, what: str, done: int, total: int) -> None:
        """Shows that `done` of `total` steps are done."""
        now = self._progress.clock()
        if self._steps is None or total != self._total or done < self._done:
            self._steps = self._progress.begin("step", counted=True, elapsed_seconds=now - self._called_at)
        self._done, self._total, self._called_at = done, total, now
        self._steps.update(done, total, facts=(what,))


def measure_run(config: RunConfig, options: ThroughputOptions, *, plot: Path | None, cost_model: Path | None) -> Report:
    """Runs the study; draws it and writes its cost model, if requested. One of the ranks shows it."""
    with joined_world() as world, Progress(console.messages(), silent=not world.is_main) as progress:
        configure_logging(world)
        study = study_throughput(config, world, options, progress=StepProgress(progress))
    report = Report(value=study, shown=throughput_tables(study), is_silent=not world.is_main)
    if report.is_silent:
        return report
    if plot is not None:
        plot_throughput(study, plot)
        report.shown.append(console.text(f"Drew {plot}"))
    if cost_model is not None and study.cost_model is not None:
        study.cost_model.write(cost_model)
        report.shown.append(console.text(f"Wrote {cost_model}"))
    elif cost_model is not None:
        report.unmet = f"{cost_model} was not written: {study.cost_model_refusal}"
    return report
