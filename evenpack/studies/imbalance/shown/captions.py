"""What the study's figures say of their lines: a legend by kind of evidence, and a caption."""

import textwrap
from typing import Any

from evenpack.studies.imbalance.measured.measurement import Measured
from evenpack.studies.imbalance.measured.replay import Replay
from evenpack.studies.imbalance.results import ImbalanceStudy
from evenpack.studies.imbalance.shown.styles import LOG_STYLE, MEASURED, PUBLISHED_STYLE
from evenpack.studies.imbalance.simulated.cluster import BASELINE
from evenpack.studies.imbalance.simulated.simulation import Simulation
from evenpack.studies.imbalance.simulated.step_cost import StepCost
from evenpack.studies.plotting import INK

_LEGEND_CHARACTERS = 120
"""Characters of a legend's line."""

_MEAN_STEP = (
    "What is estimated from measured steps is the mean of their speed-ups, which is above that of a long run (the "
    "measured point, the simulated lines) where steps scatter."
)


def legend(study: ImbalanceStudy) -> list[Any]:
    """Returns a handle for each kind of evidence in the figure, with what it is called."""
    from matplotlib.lines import Line2D

    face = "white" if study.simulation.cost.estimated else INK
    circles: dict[str, Any] = {"color": INK, "marker": "o", "markersize": 6, "markerfacecolor": face}
    handles = [Line2D([], [], label=simulated_label(study.simulation.cost), **circles)]
    if study.replay is not None:
        triangle: dict[str, Any] = {"color": INK, "marker": "^", "markersize": 8, "linestyle": "none"}
        handles.append(Line2D([], [], label=replayed_label(study.replay), **triangle))
    if study.measured is not None:
        handles.append(Line2D([], [], label=measured_label(study.measured), **MEASURED))
    if study.measured is not None and study.forecast is not None:
        run = study.measured.run
        label = (
            f"ESTIMATED from the measured steps of {run.label} on {run.ranks} devices: mean step by the law of lowest "
            "AIC; band: all laws with their intervals"
        )
        handles.append(Line2D([], [], label=label, **LOG_STYLE))
    if study.reference is not None:
        label = (
            f"{study.reference.name}: un-padding by arrival, ESTIMATED from {study.reference.devices} GPUs "
            "(PackedBERT, section E); band: nine of ten steps"
        )
        handles.append(Line2D([], [], label=label, **PUBLISHED_STYLE))
    for handle in handles:
        handle.set_label("\n".join(textwrap.wrap(str(handle.get_label()), _LEGEND_CHARACTERS)))
    return handles


def simulated_label(cost: StepCost) -> str:
    """Returns what simulated lines are by."""
    if cost.estimated:
        return f"SIMULATED with an ESTIMATED cost model, nothing measured: {cost.device}"
    return f"SIMULATED with a cost model measured on {cost.device}"


def replayed_label(replay: Replay) -> str:
    """Returns what replayed points are of."""
    return (
        f"REPLAYED, every micro-batch of each cluster computed on one {replay.measured_on.device}, no network: bars: "
        "95 %"
    )


def measured_label(measured: Measured) -> str:
    """Returns what the measured point is of."""
    run = measured.run
    device = f"{run.ranks} x {run.device or 'device not recorded'}"
    name = f"MEASURED: {run.label} ({run.layout or 'layout not recorded'}) on {device}"
    if measured.speed_up is None or measured.speed_up_interval is None:
        return f"{name}; no speed-up without a baseline"
    if not measured.is_over_padding:
        return f"{name}; its speed-up is not over padding and not drawn"
    over = "--padded-baseline" if measured.baseline is None else measured.baseline.label
    return f"{name}: {measured.speed_up:.2f} times {over}; bar: 95 %"


def caption(study: ImbalanceStudy) -> list[str]:
    """Returns the lines below the figure: what was simulated, and the warnings that belong to it."""
    simulation = study.simulation
    options = simulation.options
    return [
        f"{options.batch} sequences or {simulation.packs_per_micro_batch} packs of {simulation.pack_length:,} slots "
        f"per micro-batch, {options.accumulation} per step and device; {options.steps:,} simulated steps: means have "
        f"an error of ± {_widest(simulation):.3f} (95 %). Bands of thick lines: nine of ten simulated steps.",
        f"Cost model: {simulation.cost.origin}.",
        *([] if study.replay is None else [_replayed_steps(study.replay)]),
        *([] if study.forecast is None else [_MEAN_STEP]),
        *(f"WARNING: {warning}." for warning in study.warnings),
    ]


def _replayed_steps(replay: Replay) -> str:
    steps = ", ".join(f"{row.steps:,} on {row.devices:,}" for row in replay.of(BASELINE))
    return f"Replayed steps: {steps} devices; update {1e3 * replay.update_seconds:.3g} ms as on one device."


def _widest(simulation: Simulation) -> float:
    return max((row.speed_up_high - row.speed_up_low) / 2 for row in simulation.rows)
