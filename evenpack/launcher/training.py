"""A training run from start to end: its checks before it starts, its start, its report, and that as a table."""

import logging
import shlex
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
from evenpack.engine.config import RunConfig
from evenpack.engine.deepspeed_config import deepspeed_config
from evenpack.engine.resolving.requirements import require_trackers, require_trainable
from evenpack.engine.resolving.resolve import ResolvedRun, open_run
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
        return run


def report_training(run: ResolvedRun) -> dict[str, Any] | None:
    """Returns the run's summary.json; None if it has not written it.

    In the layout packed with `packing_efficiency` and `packing_factor` (sequences per pack): those over an epoch of
    packs, also for a run of less than one.
    """
    summary = read_json_object(run.config.run.output_dir / "summary.json")
    if summary is not None and run.shape.layout == "packed":
        item = run.part_of(summary["step"]).item
        summary |= {"packing_efficiency": item.fill, "packing_factor": float(item.sequences)}
    return summary


@dataclass(frozen=True, kw_only=True)
class TrainingResult(LaunchResult):
    """The outcome of a training run, with its report."""

    output_dir: Path
    report: dict[str, Any] | None
    """What `report_training` returns; None if the run failed, or has written no summary."""


def run_training(launch: LaunchPlan, checked: ResolvedRun) -> TrainingResult:
    """Trains a run that `check_training` has returned, with the output of the ranks on standard error.

    Raises: CheckpointError if the run cannot continue; ConfigError if a machine of the hostfile is not reached;
    RunError if the output directory cannot be locked or written.
    """
    run = checked.config.run
    require_resumable(checked)
    launch = launch.reached()
    say(f"starting {launch.devices.choice}")
    result = supervise(launch, run.output_dir, say=say, output=_standard_error(), limits=HangLimits.of(run))
    report = report_training(checked) if result.state != "failed" else None
    return TrainingResult(
        state=result.state,
        exit_code=result.exit_code,
        message=result.message,
        error=result.error,
        output_dir=run.output_dir,
        report=report,
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
        value["report"] = result.report
        figure = console.text(f"Losses and rates as a figure: evenpack report {shlex.quote(str(result.output_dir))}")
        shown += [report_table(result.report, title=f"{name}: {result.state}"), figure]
    return Report(value=value, shown=shown, exit_code=result.exit_code)


def _standard_error() -> IO[str] | None:
    """Returns a standard error that child processes can write to; a notebook's own stream may have no file."""
    try:
        sys.stderr.fileno()
    except OSError:
        return sys.__stderr__
    return sys.stderr


def report_table(report: Mapping[str, Any], *, title: str) -> Table:
    """Returns the report of a finished run as a table."""
    values: dict[str, Any] = {"steps": report["step"]}
    if "packing_factor" in report:
        efficiency = percent(report["packing_efficiency"])
        values["packing, all data"] = f"{efficiency} efficient, {report['packing_factor']:.3f} sequences per pack"
    values |= {
        "padding share, these steps": percent(report["padding_share"]),
        f"tokens/s on {counted(report['ranks'], 'rank')}": format_rate(report["tokens_per_second"]),
    }
    apart = losses_logged_apart([name.removeprefix("first_") for name in report])  # validation has only the main one
    for loss, key in [(loss.title, loss.metric) for loss in apart] or [("loss", "loss")]:
        values |= {f"{end} {loss}": _loss(report[f"{end}_{key}"]) for end in ("first", "last")}
    if report["target"] is not None:
        values[f"target accuracy {percent(report['target']['accuracy'])}"] = _target(report["target"])
    kind = "token loss" if apart else "loss"
    for source, found in (report["validation"] or {}).items():
        values[f"validation {kind}, {source}"] = "nothing held out" if found is None else _loss(found["loss"])
    return pairs(values, title=title)


def _target(target: Mapping[str, Any]) -> str:
    if not target["reached"]:
        return "not reached"
    samples, minutes = target["samples"], target["seconds"] / 60
    return f"reached with {percent(target['reached_accuracy'])} after {samples:,} sequences, {minutes:,.2f} minutes"


def _loss(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.4f}"
