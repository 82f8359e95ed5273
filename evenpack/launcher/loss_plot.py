"""Draws OUTPUT_DIR/loss.png, the losses of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from evenpack.engine.reporting.metrics import METRICS, read_metrics
from evenpack.engine.reporting.run_record import read_run_record
from evenpack.errors import ConfigError
from evenpack.losses import losses_logged_apart
from evenpack.studies.plotting import (
    COLOURS,
    THIN_AND_BOLD,
    figure_as_png,
    label_ends,
    line_style,
    smooth,
    write_footer,
    write_title,
)
from evenpack.studies.provenance import provenance_of_runs

LOSS_PLOT = "loss.png"

_PANEL_INCHES = 10.0


@dataclass(frozen=True, kw_only=True)
class LossCurve:
    """Holds one loss of a run by step, in training and on what is held out."""

    name: str
    unit: str
    steps: Sequence[int]
    losses: Sequence[float]
    validation: Mapping[str, Sequence[tuple[int, float]]]
    """Pairs (step, loss) of each source."""


def loss_curves(records: Sequence[Mapping[str, Any]]) -> list[LossCurve]:
    """Returns the losses of all steps whose loss was finite; for a model with several losses, one curve for each."""
    found = {loss.metric: loss for record in records for loss in losses_logged_apart(record)}
    if found:
        validation = {"accuracy": "loss"}  # the main loss of an evaluation
        return [
            _curve(records, loss.title, loss.unit, training=metric, validation=validation.get(loss.accuracy or ""))
            for metric, loss in found.items()
        ]
    return [_curve(records, "loss", "nats/token", training="loss")]


def _curve(
    records: Sequence[Mapping[str, Any]], name: str, unit: str, *, training: str, validation: str | None = None
) -> LossCurve:
    """`training` and `validation`: keys of a step and of a source's evaluation; the same if one is given."""
    steps = [record for record in records if record.get(training) is not None]
    points: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        for source, values in (record.get("validation") or {}).items():
            loss = (values or {}).get(validation or training)
            if loss is not None:
                points.setdefault(source, []).append((record["step"], loss))
    return LossCurve(
        name=name,
        unit=unit,
        steps=[record["step"] for record in steps],
        losses=[record[training] for record in steps],
        validation=points,
    )


def plot_loss(output_dir: Path, *, name: str) -> Path:
    """Writes OUTPUT_DIR/loss.png. Raises: ConfigError without matplotlib, or before the first step; DataError."""
    path = output_dir / LOSS_PLOT
    origin = provenance_of_runs(name, [read_run_record(output_dir)])
    plot_losses(loss_curves(read_metrics(output_dir / METRICS)), path, name=name, origin=origin)
    return path


def plot_losses(curves: Sequence[LossCurve], path: Path, *, name: str, origin: str) -> None:
    """Draws each training loss, smoothed over its light raw values, and the validation losses of each source.

    Raises: ConfigError without matplotlib, or if the run has no step.
    """
    if not all(curve.steps for curve in curves):
        raise ConfigError(f"run '{name}' has no step yet whose loss could be plotted")
    with figure_as_png(path, width=_PANEL_INCHES * len(curves), height=4.5) as figure:
        for axes, curve in zip(figure.subplots(1, len(curves), squeeze=False)[0], curves, strict=True):
            _draw(axes, curve, name)
        write_footer(figure, [origin, THIN_AND_BOLD])


def _draw(axes: Any, curve: LossCurve, name: str) -> None:
    smoothed = smooth(np.asarray(curve.losses, dtype=np.float64))
    axes.plot(curve.steps, curve.losses, color=COLOURS[0], alpha=0.25, linewidth=0.8)
    axes.plot(curve.steps, smoothed, color=COLOURS[0], linewidth=2.0, label=f"training {smoothed[-1]:.2f}")
    for index, (source, points) in enumerate(curve.validation.items(), start=1):
        style = {**line_style(index), "label": f"validation {source} {points[-1][1]:.2f}"}
        axes.plot(*zip(*points, strict=True), **style, linewidth=1.0, marker="o", markersize=4.5, clip_on=False)
    axes.set_xlabel("step (optimizer updates)")
    axes.set_ylabel(f"{curve.name} ({curve.unit})")
    axes.set_xlim(0, max([curve.steps[-1], *(points[-1][0] for points in curve.validation.values())]))
    label_ends(axes)
    write_title(axes, f"{name}: {curve.name} {curve.losses[0]:.2f} → {smoothed[-1]:.2f} in {curve.steps[-1]:,} steps")
