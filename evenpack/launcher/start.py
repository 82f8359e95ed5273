"""A training run from start to end: describes it, starts it, waits, and shows the outcome."""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from rich.console import RenderableType

from evenpack import console
from evenpack.engine.config import RunSection
from evenpack.engine.resolving.resolve import ResolvedRun
from evenpack.errors import ConfigError, DataError
from evenpack.launcher import views
from evenpack.launcher.processes.launch import LaunchPlan
from evenpack.launcher.processes.streams import say
from evenpack.launcher.processes.supervise import supervise
from evenpack.launcher.training import TrainingPlan, TrainingReport, report_training
from evenpack.units import counted


def describe_run(launch: LaunchPlan | None, plan: TrainingPlan) -> tuple[dict[str, Any], list[RenderableType]]:
    """Returns the plan of `evenpack train --dry-run` as a value for JSON and as rich tables.

    `launch` is None for ranks whose machines are not known.
    """
    from evenpack.engine.memory.text import memory_text

    value = {
        "command": None if launch is None else launch.command,
        "environment": None if launch is None else launch.environment,
        "devices": None if launch is None else launch.devices.choice,
        "plan": plan,
    }
    would_run = f"Would run on {counted(plan.ranks, 'rank')}, as --ranks says; nothing could be started here"
    if launch is not None:
        would_run = f"Would run on {launch.devices.choice}:\n\n{launch.shell_line()}"
    shown: list[RenderableType] = [
        console.text(would_run),
        views.plan_table(plan),
        console.text(memory_text(plan.memory, batching=plan.batching)),
        console.text(f"DeepSpeed gets {json.dumps(plan.deepspeed, indent=2)}"),
    ]
    return value, shown


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """The outcome of a training run."""

    state: Literal["finished", "stopped", "failed"]
    """`stopped`: it was asked to stop, has saved, and continues when it is started again."""
    message: str
    """Message for the user; empty if the ranks have printed everything."""
    error: str | None
    """The error that the first failed rank has printed, if the user can correct it; None for any other end."""
    exit_code: int
    output_dir: Path
    report: TrainingReport | None
    """None if it failed, or has written no summary."""
    loss_plot: Path | None
    """None without a report, or if it could not be drawn."""


def run_training(launch: LaunchPlan, checked: ResolvedRun) -> TrainingResult:
    """Trains a run that `check_training` has returned, with the output of the ranks on standard error.

    Raises: ConfigError if a machine of the hostfile is not reached; RunError if the output directory cannot be locked
    or written.
    """
    run = checked.config.run
    launch = launch.reached(os.environ)
    say(f"starting {launch.devices.choice}")
    result = supervise(
        launch, run.output_dir, say=say, output=_standard_error(), hang_timeout_seconds=run.hang_timeout_seconds
    )
    report = report_training(checked) if result.state != "failed" else None
    return TrainingResult(
        state=result.state,
        message=result.message,
        error=result.error,
        exit_code=result.exit_code,
        output_dir=run.output_dir,
        report=report,
        loss_plot=_try_to_draw(run) if report is not None else None,
    )


def describe_result(name: str, result: TrainingResult) -> tuple[dict[str, Any], list[RenderableType]]:
    """Returns the outcome of the run `name` as a value for JSON and as rich tables.

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
        shown.append(views.report_table(result.report, title=f"{name}: {result.state}"))
        if result.loss_plot is not None:
            shown.append(console.text(f"Loss plot: {result.loss_plot}"))
    return value, shown


def _standard_error() -> IO[str] | None:
    """Returns a standard error that child processes can write to; a notebook's own stream may have no file."""
    try:
        sys.stderr.fileno()
    except OSError:
        return sys.__stderr__
    return sys.stderr


def _try_to_draw(run: RunSection) -> Path | None:
    """Draws the loss plot; a run does not fail without it."""
    from evenpack.launcher.loss_plot import draw_loss

    try:
        return draw_loss(run.output_dir, name=run.name)
    except (ConfigError, DataError) as error:
        say(f"no loss plot: {error}")
        return None
