"""The study of throughput on this process's ranks."""

import time
from collections.abc import Callable
from pathlib import Path

from evenpack import console
from evenpack.console import Report
from evenpack.engine.config import RunConfig
from evenpack.engine.distributed import configure_logging, joined_world
from evenpack.progress import format_duration
from evenpack.studies.throughput.plots import plot_throughput
from evenpack.studies.throughput.study import (
    ThroughputOptions,
    study_throughput,
)
from evenpack.studies.throughput.tables import throughput_tables

_LINE_SECONDS = 10.0


class StudyProgress:
    """A line for the first and last step and every few seconds, with the time to go."""

    def __init__(self, *, silent: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._silent = silent
        self._clock = clock
        self._started = clock()
        self._shown_at = self._started
        self._total = self._done = 0

    def __call__(self, what: str, done: int, total: int) -> None:
        """`done` of `total` steps are done."""
        now = self._clock()
        if total != self._total or done < self._done:
            self._started = self._shown_at = now
        self._total, self._done = total, done
        is_due = now - self._shown_at >= _LINE_SECONDS or done == total
        if self._silent or not is_due:
            return
        self._shown_at = now
        to_go = (now - self._started) / max(done - 1, 1) * (total - done)
        console.messages().print(f"step {done} of {total} ({what})  {format_duration(to_go)} to go", soft_wrap=True)


def measure_run(config: RunConfig, options: ThroughputOptions, *, plot: Path | None, cost_model: Path | None) -> Report:
    """The study; draws it and writes its cost model, if asked. One of the ranks shows it."""
    with joined_world() as world:
        configure_logging(world)
        study = study_throughput(config, world, options, progress=StudyProgress(silent=not world.is_main))
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
