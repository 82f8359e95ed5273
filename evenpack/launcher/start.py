"""A training run from start to end: describes it, starts it, waits, and shows the outcome."""

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from evenpack import console
from evenpack.engine.config import RunSection
from evenpack.errors import ConfigError, DataError
from evenpack.launcher import views
from evenpack.launcher.loss_plot import draw_loss
from evenpack.launcher.processes.launch import LaunchPlan
from evenpack.launcher.processes.streams import say
from evenpack.launcher.processes.supervise import supervise
from evenpack.launcher.training import TrainingPlan, report_training


def describe_run(launch: LaunchPlan, plan: TrainingPlan) -> tuple[dict[str, Any], list[RenderableType]]:
    """Returns the plan of `evenpack train --dry-run` as a value for JSON and as rich tables."""
    value = {
        "command": launch.command,
        "environment": launch.environment,
        "devices": launch.devices.choice,
        "plan": plan,
    }
    shown: list[RenderableType] = [
        console.text(f"Would run on {launch.devices.choice}:\n\n{launch.shell_line()}"),
        views.plan_table(plan),
        console.text(f"DeepSpeed gets {json.dumps(plan.deepspeed, indent=2)}"),
    ]
    return value, shown


def run_training(
    run: RunSection, launch: LaunchPlan, plan: TrainingPlan
) -> tuple[dict[str, Any], list[RenderableType], int]:
    """Trains; returns the outcome as a value for JSON and as rich tables, and the exit code.

    Raises: RunError if the output directory cannot be locked or written.
    """
    output_dir = run.output_dir
    say(f"starting {launch.devices.choice}")
    result = supervise(launch, output_dir, say=say, output=sys.stderr)
    if result.state == "failed":
        if result.message:
            console.print_error(result.message)
    elif result.message:
        say(result.message)
    value: dict[str, Any] = {"state": result.state, "message": result.message, "output_dir": output_dir}
    report = report_training(plan, output_dir) if result.state != "failed" else None
    shown: list[RenderableType] = []
    if report is not None:
        value |= {"report": report, "loss_plot": _try_to_draw(run)}
        shown.append(views.report_table(report, title=f"{run.name}: {result.state}"))
        if value["loss_plot"] is not None:
            shown.append(console.text(f"Loss plot: {value['loss_plot']}"))
    return value, shown, result.exit_code


def _try_to_draw(run: RunSection) -> Path | None:
    """Draws the loss plot; a run does not fail without it."""
    try:
        return draw_loss(run.output_dir, name=run.name)
    except (ConfigError, DataError) as error:
        say(f"no loss plot: {error}")
        return None
