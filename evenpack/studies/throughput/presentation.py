"""`evenpack study throughput` as tables and as a figure."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import RenderableType

from evenpack import console
from evenpack.engine.resolving.cost_model import CostModel
from evenpack.progress import format_rate
from evenpack.studies.columns import Column, cells_by_column, table_of
from evenpack.studies.plotting import COLOURS, INK, figure_as_png, write_footer, write_title
from evenpack.studies.provenance import provenance_line
from evenpack.studies.throughput.study import LayoutRow, ThroughputStudy

_SECONDS = (
    Column("step, s (middle half)", "step_seconds", ".4g"),
    Column("forward, s", "forward_seconds", ".4g"),
    Column("backward, s", "backward_seconds", ".4g"),
    Column("all-reduce, s", "all_reduce_seconds", ".4g"),
    Column("optimizer, s", "update_seconds", ".4g"),
    Column("loader, s (parallel to the step)", "loader_seconds", ".4g"),
)
_RATES = (
    Column("slots/s", "slots_per_second.median", ",.4g"),
    Column("tokens/s", "tokens_per_second.median", ",.4g"),
    Column("sequences/s (middle half)", "sequences_per_second", ".4g"),
    Column("sequences per row", "sequences_per_pack", ".3f"),
    Column("padding share", "padding_share", ".2%"),
    Column("useful TFLOP/s", "useful_tflops.median", ".4g"),
    Column("performed TFLOP/s", "performed_tflops.median", ".4g"),
    Column("MFU", "mfu.median", ".2%"),
)
_DEPTHS = (
    Column("depth", missing="max"),
    Column("packing factor", "packing_factor", ".3f"),
    Column("step, s (middle half)", "step_seconds", ".4g"),
    Column("overhead (middle half)", lambda row: row.overhead.in_percent()),
    Column("predicted speed-up", "predicted_speed_up", ".3f"),
    Column("realised (middle half)", "realised_speed_up", ".4g"),
)
_NO_PADDING = 0.00005
"""Share of padding that the table shows as 0.00 %."""


def throughput_tables(study: ThroughputStudy) -> list[RenderableType]:
    """Returns tables of the provenance, layouts, depths, and the cost model."""
    origin, options = study.measured_on, study.options
    head = (
        f"{study.run}: {origin.model} ({origin.layers} layers of {origin.hidden_size}) on {study.ranks} x "
        f"{origin.device}\n{origin.precision}, attention {origin.attention}; {study.rows_per_step} rows of "
        f"{study.pack_length} slots per step, {study.rows_per_micro_batch} per micro-batch; medians of "
        f"{options.rounds} steps after {options.warmup}, {options.clock} clock; commit {origin.commit or 'unknown'}"
    )
    shown: list[RenderableType] = [console.text(head), _layout_table(study)]
    full = [row.layout for row in study.layouts if row.layout.startswith("padded") and row.padding_share < _NO_PADDING]
    if full:
        shown.append(
            console.text(
                f"{', '.join(full)} has no padding here: every sequence is as long as a row, as in recipes that cut at "
                "its end. There is none that packing could save."
            )
        )
    if study.ratio_of_promised_speed_up is not None:
        shown.append(
            console.text(
                f"packed over padded sequences/s, divided by the packing factor: {study.ratio_of_promised_speed_up:.3f}"
            )
        )
    if study.depths:
        title = "Packing depths (padding: one sequence per row; overhead: relative to attention across whole packs)"
        shown.append(table_of(study.depths, _DEPTHS, title=title))
    if study.cost_model is not None:
        shown.append(cost_model_table(study.cost_model))
    elif study.cost_model_refusal is not None:
        shown.append(console.text(f"No cost model: {study.cost_model_refusal}"))
    return shown


def _layout_table(study: ThroughputStudy) -> RenderableType:
    """Returns the layouts side by side, one figure per line."""
    memory = "peak memory" if "CPU" not in study.measured_on.device else "peak memory (resident, of the process)"
    columns = (
        *_SECONDS,
        Column("waiting for the slowest rank", lambda row: None if study.ranks == 1 else row.wait_share, ".2%"),
        *_RATES,
        Column(memory, lambda row: f"{row.peak_memory_bytes / 1e9:.2f} GB"),
    )
    title = "Layouts: each lays out the same packs; one with a policy after the / as many single sequences instead"
    return console.table(cells_by_column(study.layouts, columns, heading=Column("layout")), title=title)


def cost_model_table(model: CostModel) -> RenderableType:
    """Returns the cost of a micro-batch, and its error."""
    origin = model.measured_on
    rows = {
        "per micro-batch": f"{model.constant * 1e3:.4g} ms",
        "a: per slot": f"{model.per_slot * 1e6:.4g} µs",
        "b: per squared length": f"{model.per_squared_length * 1e9:.4g} ns",
        **{
            f"b: per pair within a window of {window}": f"{seconds * 1e9:.4g} ns"
            for window, seconds in model.per_pair_within.items()
        },
        **({"per segment": f"{model.per_segment * 1e6:.4g} µs"} if model.per_segment else {}),
        **({"per step (optimizer)": f"{model.per_step * 1e3:.4g} ms"} if model.per_step else {}),
        "length at which attention costs as much as everything else": _crossing(model),
        "error on held-out micro-batches": f"median {console.percent(model.held_out_median_error)}, 95 % within "
        f"{console.percent(model.held_out_95_percent_error)}",
        "noise": console.percent(model.noise)
        + ("" if model.repeat_noise is None else f", of repeats {console.percent(model.repeat_noise)}"),
        "measured": f"{model.samples} micro-batches; layers: {origin.layers}, not scaled to another number",
        "for the run file": "training.cost_model=FILE, the one that --cost-model writes",
    }
    return console.pairs(rows, title="Cost model: forward and backward of a micro-batch")


def _crossing(model: CostModel) -> str:
    if model.per_squared_length == 0.0:
        return "none"
    near = sum(seconds * (2 * window + 1) for window, seconds in model.per_pair_within.items())
    return f"{max(0.0, model.per_slot - near) / model.per_squared_length:,.0f}"


_PHASES = {
    "forward": "forward",
    "backward": "backward",
    "all_reduce": "all-reduce",
    "update": "optimizer",
}
"""Phases of a step, with their names for people."""
_PANEL_INCHES = 5.2
_BAR_INCHES = 1.2
"""Width of a bar in inches: the longest word of a layout's name fits without overlap."""


def plot_throughput(study: ThroughputStudy, path: Path) -> None:
    """Draws the phases of a step in each layout, and sequences/s.

    Raises: ConfigError without matplotlib.
    """
    with figure_as_png(path, width=2 * max(_PANEL_INCHES, _BAR_INCHES * len(study.layouts)), height=4.6) as figure:
        axes = figure.subplots(1, 2)
        _draw_phases(axes[0], study.layouts)
        _draw_rates(axes[1], study.layouts)
        write_footer(figure, _footer(study))


def _footer(study: ThroughputStudy) -> list[str]:
    origin = study.measured_on
    return [
        provenance_line(
            study.run,
            data=study.data,
            evenpack=origin.evenpack,
            commits=[origin.commit],
            device=f"{study.ranks} x {origin.device}",
        ),
        f"{origin.model}, {origin.layers} layers of {origin.hidden_size}, {origin.precision}, attention "
        f"{origin.attention}; {study.rows_per_step} rows of {study.pack_length} slots per step. Medians of "
        f"{study.options.rounds} steps; bars: the middle half; phases: of rank 0.",
    ]


def _draw_phases(axes: Any, rows: Sequence[LayoutRow]) -> None:
    names, floors = [_in_lines(row.layout) for row in rows], np.zeros(len(rows))
    for (phase, label), colour in zip(_PHASES.items(), COLOURS, strict=False):
        values = [getattr(row, f"{phase}_seconds") for row in rows]
        axes.bar(names, values, bottom=floors, color=colour, width=0.6, label=label)
        floors = floors + values
    axes.set_ylabel("seconds per step")
    axes.set_ylim(top=1.25 * floors.max())
    axes.legend(frameon=False, ncols=2, loc="upper center", fontsize=9)
    write_title(axes, "Where a step's time goes")


def _draw_rates(axes: Any, rows: Sequence[LayoutRow]) -> None:
    ends = [(one.quartile_1, one.median, one.quartile_3) for one in (row.sequences_per_second for row in rows)]
    low, median, high = np.transpose(ends)
    style = {"color": COLOURS[0], "alpha": 0.85, "width": 0.6, "ecolor": INK, "capsize": 4}
    bars = axes.bar([_in_lines(row.layout) for row in rows], median, yerr=[median - low, high - median], **style)
    axes.bar_label(bars, fmt=format_rate, label_type="center", color="white", fontweight="bold")
    axes.set_ylabel("sequences/s")
    write_title(axes, "Throughput of the layouts")


def _in_lines(layout: str) -> str:
    """Returns `unpadded/sorted_serpentine` with one word per line, for the label of a bar."""
    return layout.replace("/", "/\n").replace("_", "_\n")
