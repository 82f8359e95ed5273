"""The loss plot OUTPUT_DIR/loss.png."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float64

from evenpack.engine.reporting.metrics import read_metrics
from evenpack.errors import ConfigError
from evenpack.launcher.training import losses_of
from evenpack.studies.plotting import COLOURS, figure_as_png, label_ends, write_title

LOSS_PLOT = "loss.png"


@dataclass(frozen=True, kw_only=True)
class LossCurve:
    """Losses of a run by step, in nats/target."""

    steps: Sequence[int]
    losses: Sequence[float]
    validation: Mapping[str, Sequence[tuple[int, float]]]
    """Pairs (step, loss) of each source."""


def loss_curve(output_dir: Path) -> LossCurve:
    """Returns the losses of all steps in the run's metrics whose loss was finite."""
    records = read_metrics(output_dir / "metrics.jsonl")
    steps = [record for record in records if record.get("loss") is not None]
    validation: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        for source, loss in losses_of(record.get("validation") or {}).items():
            if loss is not None:
                validation.setdefault(source, []).append((record["step"], loss))
    return LossCurve(
        steps=[record["step"] for record in steps], losses=[record["loss"] for record in steps], validation=validation
    )


def draw_loss(output_dir: Path, *, name: str) -> Path:
    """Writes OUTPUT_DIR/loss.png. Raises: ConfigError without matplotlib, or before the first step."""
    path = output_dir / LOSS_PLOT
    plot_loss(loss_curve(output_dir), path, name=name)
    return path


def plot_loss(curve: LossCurve, path: Path, *, name: str) -> None:
    """Draws the training loss, smoothed over its light raw values, and the validation losses of each source.

    Raises: ConfigError without matplotlib, or if the curve has no step.
    """
    if not curve.steps:
        raise ConfigError(f"run '{name}' has no step yet whose loss could be plotted")
    smoothed = smooth(np.asarray(curve.losses, dtype=np.float64))
    last = _last_step(curve)
    with figure_as_png(path, width=8.0, height=4.5) as figure:
        axes = figure.add_subplot()
        axes.plot(curve.steps, curve.losses, color=COLOURS[0], alpha=0.25, linewidth=0.8)
        axes.plot(curve.steps, smoothed, color=COLOURS[0], linewidth=2.0)
        ends = [(f"training {smoothed[-1]:.2f}", float(smoothed[-1]), COLOURS[0])]
        for index, (source, points) in enumerate(curve.validation.items(), start=1):
            colour = COLOURS[index % len(COLOURS)]
            axes.plot(*zip(*points, strict=True), color=colour, linewidth=1.0, marker="o", markersize=4.5)
            ends.append((f"validation {source} {points[-1][1]:.2f}", points[-1][1], colour))
        axes.set_xlabel("step (optimizer updates)")
        axes.set_ylabel("loss (nats/target)")
        axes.set_xlim(0, last)
        label_ends(axes, ends)
        write_title(axes, f"{name}: loss {curve.losses[0]:.2f} → {smoothed[-1]:.2f} in {curve.steps[-1]:,} steps")


def smooth(losses: Float64[np.ndarray, " steps"]) -> Float64[np.ndarray, " steps"]:
    """Returns the mean over about a fiftieth of the run around each step, at least five steps; fewer at both ends."""
    reach = min(max(2, len(losses) // 100), len(losses) // 10)
    window = np.ones(2 * reach + 1)
    return np.convolve(losses, window, mode="same") / np.convolve(np.ones_like(losses), window, mode="same")


def _last_step(curve: LossCurve) -> int:
    return max([curve.steps[-1], *(points[-1][0] for points in curve.validation.values())])
