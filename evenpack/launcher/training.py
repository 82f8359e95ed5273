"""A training run from start to end: its plan before it starts, its start, its report, and each as tables for people."""

import logging
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rich.console import RenderableType
from rich.table import Table

from evenpack import console
from evenpack.console import Report, pairs, percent
from evenpack.data.verification import explained_damage
from evenpack.engine.checkpoints.continuation import require_resumable
from evenpack.engine.config import RunConfig, RunSection
from evenpack.engine.deepspeed_config import deepspeed_config
from evenpack.engine.memory.host import require_host_memory
from evenpack.engine.resolving.data_facts import epochs_of_steps, implausible_epochs
from evenpack.engine.resolving.requirements import require_trackers, require_trainable
from evenpack.engine.resolving.resolve import ResolvedRun, open_run
from evenpack.errors import ConfigError, DataError
from evenpack.files import read_json_object
from evenpack.launcher.processes.hangs import HangLimits
from evenpack.launcher.processes.start import LaunchPlan
from evenpack.launcher.processes.stop import say
from evenpack.launcher.processes.supervise import LaunchResult, supervise
from evenpack.losses import losses_logged_apart
from evenpack.progress import format_rate
from evenpack.units import counted

log = logging.getLogger(__name__)


def check_training(config: RunConfig, *, ranks: int) -> ResolvedRun:
    """Checks what can be known in a moment, without torch, before a process is started; the ranks check the rest.

    Raises: NotPreparedError or DataError; ConfigError if the ranks cannot divide a step, or
    `training.packing_adjustment` is not possible; and see `require_trainable` and `require_trackers`.
    """
    with explained_damage(config.prepared_dir):
        run = open_run(config, verify="later")  # by the ranks
        require_trainable(run)
        require_trackers(run.config.metrics)
        run.require_divisible(ranks)
        for stage in run.of_stages:
            deepspeed_config(stage.config, ranks)
        steps = run.config.training.planned_steps
        epochs = epochs_of_steps(run.config, run.prepared) if len(run.parts) == 1 else run.epochs(steps)
        implausible = implausible_epochs(run.config, epochs)
        if implausible is not None:
            log.warning("%s", implausible)
        return run


@dataclass(frozen=True, kw_only=True)
class TrainingReport:
    """The main figures of a finished run."""

    step: int
    packing_efficiency: float | None
    """Efficiency over an epoch of packs, also for a run of less than one; None where the layout computes no packs."""
    packing_factor: float | None
    """Sequences per pack, in the same way."""
    padding_share: float
    """Fraction of the slots that the run has computed."""
    ranks: int
    """Ranks of the last step, and of the steps over which the rate is measured."""
    tokens_per_second: float
    """Real tokens/s over all ranks; the median step, without evaluation and saving."""
    first_loss: float | None
    """Loss in nats/token, next-sentence loss included where there is one; None if it was not finite."""
    last_loss: float | None
    losses_apart: dict[str, float | None]
    """The parts of these two, as in summary.json, of a model that has several losses."""
    target: dict[str, Any] | None
    """Result for training.target_accuracy; None if there is none."""
    validation_loss: dict[str, float | None]
    """Loss of each source, at the last evaluation; NaN if it was not finite, None if nothing is held out."""


def report_training(run: ResolvedRun) -> TrainingReport | None:
    """Reports from the run's files; None if it has not written its summary."""
    summary = read_json_object(run.config.run.output_dir / "summary.json")
    if summary is None:
        return None
    item = run.part_of(summary["step"]).item if run.shape.layout == "packed" else None
    return TrainingReport(
        step=summary["step"],
        packing_efficiency=None if item is None else item.fill,
        packing_factor=None if item is None else float(item.sequences),
        padding_share=summary["padding_share"],
        ranks=summary["ranks"],
        tokens_per_second=summary["tokens_per_second"],
        first_loss=summary["first_loss"],
        last_loss=summary["last_loss"],
        losses_apart={
            f"{end}_{loss.metric}": summary[f"{end}_{loss.metric}"]
            for end in ("first", "last")
            for loss in losses_logged_apart([name.removeprefix("first_") for name in summary])
        },
        target=summary["target"],
        validation_loss={
            source: None if found is None else math.nan if found["loss"] is None else found["loss"]
            for source, found in (summary["validation"] or {}).items()
        },
    )


@dataclass(frozen=True, kw_only=True)
class TrainingResult(LaunchResult):
    """The outcome of a training run, with its report."""

    output_dir: Path
    report: TrainingReport | None
    """The run's report; None if it failed, or has written no summary."""
    loss_plot: Path | None
    """The plot of losses; None without a report, or if it could not be drawn."""


def run_training(launch: LaunchPlan, checked: ResolvedRun) -> TrainingResult:
    """Trains a run that `check_training` has returned, with the output of the ranks on standard error.

    Raises: CheckpointError if the run cannot continue; ConfigError if a machine of the hostfile is not reached, or this
    one has too little memory; RunError if the output directory cannot be locked or written.
    """
    run, devices = checked.config.run, launch.devices
    require_resumable(checked)
    if devices.kind == "cpu":
        for stage in checked.of_stages:
            require_host_memory(stage, ranks=devices.ranks, ranks_here=devices.ranks)
    launch = launch.reached(os.environ)
    say(f"starting {devices.choice}")
    result = supervise(launch, run.output_dir, say=say, output=_standard_error(), limits=HangLimits.of(run))
    report = report_training(checked) if result.state != "failed" else None
    return TrainingResult(
        state=result.state,
        exit_code=result.exit_code,
        message=result.message,
        error=result.error,
        output_dir=run.output_dir,
        report=report,
        loss_plot=_try_to_draw(run) if report is not None else None,
    )


def describe_result(name: str, result: TrainingResult) -> Report:
    """Returns the report of the run `name` that has ended.

    The reason of a failure or stop is printed on standard error.
    """
    if result.message and result.state == "failed":
        console.print_error(result.message)
    elif result.message:
        say(result.message)
    value: dict[str, Any] = {"state": result.state, "message": result.message, "output_dir": result.output_dir}
    shown: list[RenderableType] = []
    if result.report is not None:
        value |= {"report": result.report, "loss_plot": result.loss_plot}
        shown.append(report_table(result.report, title=f"{name}: {result.state}"))
        if result.loss_plot is not None:
            shown.append(console.text(f"Loss plot: {result.loss_plot}"))
    return Report(value=value, shown=shown, exit_code=result.exit_code)


def _standard_error() -> IO[str] | None:
    """Returns a standard error that child processes can write to; a notebook's own stream may have no file."""
    try:
        sys.stderr.fileno()
    except OSError:
        return sys.__stderr__
    return sys.stderr


def _try_to_draw(run: RunSection) -> Path | None:
    """Draws the loss plot; a run does not fail without it."""
    from evenpack.launcher.loss_plot import plot_loss

    try:
        return plot_loss(run.output_dir, name=run.name)
    except (ConfigError, DataError) as error:
        say(f"no loss plot: {error}")
        return None


def report_table(report: TrainingReport, *, title: str) -> Table:
    """Returns the report of a finished run as a table."""
    values: dict[str, Any] = {"steps": report.step}
    if report.packing_efficiency is not None and report.packing_factor is not None:
        values["packing, all data"] = (
            f"{percent(report.packing_efficiency)} efficient, {report.packing_factor:.3f} sequences per pack"
        )
    values |= {
        "padding share, these steps": percent(report.padding_share),
        f"tokens/s on {counted(report.ranks, 'rank')}": format_rate(report.tokens_per_second),
        **_training_losses(report),
    }
    if report.target is not None:
        values[f"target accuracy {percent(report.target['accuracy'])}"] = _target(report.target)
    kind = "token loss" if report.losses_apart else "loss"
    for source, loss in report.validation_loss.items():
        values[f"validation {kind}, {source}"] = _loss(loss) if loss is not None else "nothing held out"
    return pairs(values, title=title)


def _training_losses(report: TrainingReport) -> dict[str, str]:
    """Returns the losses as text, each separately if there are several, since validation has only the main one."""
    if not report.losses_apart:
        return {"first loss": _loss(report.first_loss), "last loss": _loss(report.last_loss)}
    ends = [name.removeprefix("first_") for name in report.losses_apart]
    return {
        f"{end} {loss.title}": _loss(report.losses_apart[f"{end}_{loss.metric}"])
        for loss in losses_logged_apart(ends)
        for end in ("first", "last")
    }


def _target(target: Mapping[str, Any]) -> str:
    if not target["reached"]:
        return "not reached"
    samples, minutes = target["samples"], target["seconds"] / 60
    return f"reached with {percent(target['reached_accuracy'])} after {samples:,} sequences, {minutes:,.2f} minutes"


def _loss(loss: float | None) -> str:
    return f"{loss:.4f}" if loss is not None and math.isfinite(loss) else "not finite"
