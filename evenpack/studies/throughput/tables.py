"""`evenpack study throughput` as tables."""

from collections.abc import Callable
from typing import Any

from rich.console import RenderableType

from evenpack import console
from evenpack.engine.resolving.cost_model import CostModel
from evenpack.studies.throughput.measure import Quartiles
from evenpack.studies.throughput.study import DepthRow, LayoutRow, ThroughputStudy

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
        shown.append(console.table([_depth_row(row) for row in study.depths], title=title))
    if study.cost_model is not None:
        shown.append(cost_model_table(study.cost_model))
    elif study.cost_model_refusal is not None:
        shown.append(console.text(f"No cost model: {study.cost_model_refusal}"))
    return shown


def _layout_table(study: ThroughputStudy) -> RenderableType:
    """Returns the layouts side by side, one figure per line."""
    memory = "peak memory" if "CPU" not in study.measured_on.device else "peak memory (resident, of the process)"
    lines: dict[str, Callable[[LayoutRow], str]] = {
        "step, s (middle half)": lambda row: _spread(row.step_seconds),
        "forward, s": lambda row: f"{row.forward_seconds:.4g}",
        "backward, s": lambda row: f"{row.backward_seconds:.4g}",
        "all-reduce and clipping, s": lambda row: f"{row.all_reduce_seconds:.4g}",
        "optimizer, s": lambda row: f"{row.update_seconds:.4g}",
        "loader, s (parallel to the step)": lambda row: f"{row.loader_seconds:.4g}",
        "waiting for the slowest rank": lambda row: "-" if study.ranks == 1 else console.percent(row.wait_share),
        "slots/s": lambda row: f"{row.slots_per_second.median:,.4g}",
        "tokens/s": lambda row: f"{row.tokens_per_second.median:,.4g}",
        "sequences/s (middle half)": lambda row: _spread(row.sequences_per_second),
        "sequences per row": lambda row: f"{row.sequences_per_pack:.3f}",
        "padding share": lambda row: console.percent(row.padding_share),
        "useful TFLOP/s": lambda row: f"{row.useful_tflops.median:.4g}",
        "performed TFLOP/s": lambda row: f"{row.performed_tflops.median:.4g}",
        "MFU": lambda row: "-" if row.mfu is None else console.percent(row.mfu.median),
        memory: lambda row: f"{row.peak_memory_bytes / 1e9:.2f} GB",
    }
    rows = [{"": name, **{row.layout: show(row) for row in study.layouts}} for name, show in lines.items()]
    title = "Layouts: each lays out the same packs; one with a policy after the / as many single sequences instead"
    return console.table(rows, title=title)


def _depth_row(row: DepthRow) -> dict[str, Any]:
    return {
        "depth": "max" if row.depth is None else row.depth,
        "packing factor": f"{row.packing_factor:.3f}",
        "step, s (middle half)": _spread(row.step_seconds),
        "overhead (middle half)": _spread(row.overhead, scale=100.0, unit=" %"),
        "predicted speed-up": f"{row.predicted_speed_up:.3f}",
        "realised (middle half)": _spread(row.realised_speed_up),
    }


def cost_model_table(model: CostModel) -> RenderableType:
    """Returns the cost of a micro-batch, and its error."""
    origin = model.measured_on
    rows = {
        "per micro-batch": f"{model.constant * 1e3:.4g} ms",
        "a: per slot": f"{model.per_token * 1e6:.4g} µs",
        "b: per squared length": f"{model.per_squared_length * 1e9:.4g} ns",
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
    return f"{model.per_token / model.per_squared_length:,.0f}"


def _spread(spread: Quartiles, *, scale: float = 1.0, unit: str = "") -> str:
    median, low, high = (scale * value for value in (spread.median, spread.quartile_1, spread.quartile_3))
    return f"{median:.4g}{unit} ({low:.4g} to {high:.4g})"
