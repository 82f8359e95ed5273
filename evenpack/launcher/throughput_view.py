"""What `evenpack study throughput` shows."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from evenpack.config import nearest
from evenpack.engine.config import RunConfig
from evenpack.engine.cost_model import CostModel
from evenpack.engine.distributed import World, configure_logging, joined_world
from evenpack.engine.reporting.metrics import format_duration
from evenpack.errors import ConfigError
from evenpack.launcher import console
from evenpack.launcher.inspection import parse_depths
from evenpack.studies.plots import require_plot
from evenpack.studies.throughput.clock import ClockName, Spread
from evenpack.studies.throughput.contenders import DEPTHS, LAYOUTS, parse_forms
from evenpack.studies.throughput.plots import plot_throughput
from evenpack.studies.throughput.study import (
    DepthRow,
    LayoutRow,
    ThroughputOptions,
    ThroughputStudy,
    study_throughput,
)

_CLOCKS: tuple[ClockName, ...] = ("wall", "cpu")
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


def parse_options(
    *,
    layouts: str | None,
    depths: str | None,
    rounds: int,
    warmup: int,
    samples: int,
    clock: str,
    plot: Path | None,
    cost_model: Path | None,
) -> ThroughputOptions:
    """Raises: ConfigError for what cannot be measured, drawn or written, before anything is read."""
    if plot is not None:
        require_plot(plot)
    if cost_model is not None and not cost_model.absolute().parent.is_dir():
        raise ConfigError(
            f"--cost-model {cost_model}: there is no folder {cost_model.absolute().parent}; make it first"
        )
    if cost_model is not None and samples == 0:
        raise ConfigError("--cost-model needs --samples: with 0 of them no cost model is fitted")
    return ThroughputOptions(
        layouts=parse_forms(layouts or ",".join(LAYOUTS)),
        depths=DEPTHS if depths is None else () if depths == "" else tuple(dict.fromkeys(parse_depths(depths))),
        rounds=rounds,
        warmup=warmup,
        samples=samples,
        clock=parse_clock(clock),
    )


def parse_clock(given: str) -> ClockName:
    """Raises: ConfigError for another word."""
    for name in _CLOCKS:
        if name == given:
            return name
    raise ConfigError(f"--clock {given}: there is no such clock; {nearest(given, _CLOCKS)}")


def measure_run(
    config: RunConfig, options: ThroughputOptions, *, plot: Path | None, cost_model: Path | None
) -> tuple[ThroughputStudy, list[RenderableType], World]:
    """The study as a value for JSON and as what rich can print, and the ranks that made it: one of them shows it."""
    with joined_world() as world:
        configure_logging(world)
        study = study_throughput(config, world, options, progress=StudyProgress(silent=not world.is_main))
    shown: list[RenderableType] = [*throughput_tables(study)]
    if not world.is_main:
        return study, [], world
    if plot is not None:
        plot_throughput(study, plot)
        shown.append(console.text(f"Drew {plot}"))
    if cost_model is not None and study.cost_model is not None:
        study.cost_model.write(cost_model)
        shown.append(console.text(f"Wrote {cost_model}"))
    return study, shown, world


def throughput_tables(study: ThroughputStudy) -> list[RenderableType]:
    """What it says of itself, layouts, depths, the cost model."""
    origin, options = study.measured_on, study.options
    head = (
        f"{study.run}: {origin.model} ({origin.layers} layers of {origin.hidden_size}) on {study.ranks} x "
        f"{origin.device}\n{origin.precision}, attention {origin.attention}; {study.rows_per_step} rows of "
        f"{study.pack_length} slots a step, {study.rows_per_micro_batch} a micro-batch; medians of {options.rounds} "
        f"steps after {options.warmup}, {options.clock} clock; commit {origin.commit or 'unknown'}"
    )
    shown: list[RenderableType] = [console.text(head), _layout_table(study)]
    if study.ratio_of_promised_speed_up is not None:
        shown.append(
            console.text(
                f"packed over padded sequences/s, divided by the packing factor: {study.ratio_of_promised_speed_up:.3f}"
            )
        )
    if study.depths:
        title = "Packing depths (padding: a sequence a row; overhead: over the model that attends across whole packs)"
        shown.append(console.table([_depth_row(row) for row in study.depths], title=title))
    if study.cost_model is not None:
        shown.append(cost_model_table(study.cost_model))
    elif study.cost_model_refusal is not None:
        shown.append(console.text(f"No cost model: {study.cost_model_refusal}"))
    return shown


def _layout_table(study: ThroughputStudy) -> RenderableType:
    """Layouts side by side, a figure a line."""
    memory = "peak memory" if "CPU" not in study.measured_on.device else "peak memory (resident, of the process)"
    lines: dict[str, Callable[[LayoutRow], str]] = {
        "step, s (middle half)": lambda row: _spread(row.step_seconds),
        "forward, s": lambda row: f"{row.forward_seconds:.4g}",
        "backward, s": lambda row: f"{row.backward_seconds:.4g}",
        "exchange and clipping, s": lambda row: f"{row.all_reduce_seconds:.4g}",
        "optimizer, s": lambda row: f"{row.update_seconds:.4g}",
        "loader, s (beside the step)": lambda row: f"{row.loader_seconds:.4g}",
        "slots/s": lambda row: f"{row.slots_per_second.median:,.4g}",
        "tokens/s": lambda row: f"{row.tokens_per_second.median:,.4g}",
        "sequences/s (middle half)": lambda row: _spread(row.sequences_per_second),
        "sequences a row": lambda row: f"{row.sequences_per_pack:.3f}",
        "padding share": lambda row: console.percent(row.padding_share),
        "useful TFLOP/s": lambda row: f"{row.useful_tflops.median:.4g}",
        "performed TFLOP/s": lambda row: f"{row.performed_tflops.median:.4g}",
        "MFU": lambda row: "-" if row.mfu is None else console.percent(row.mfu.median),
        memory: lambda row: f"{row.peak_memory_bytes / 1e9:.2f} GB",
    }
    rows = [{"": name, **{row.layout: show(row) for row in study.layouts}} for name, show in lines.items()]
    return console.table(
        rows, title="Layouts (alone: the same packs in each; with a policy: single sequences, as many as else packs)"
    )


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
    """What a micro-batch costs, and how sure that is."""
    origin = model.measured_on
    rows = {
        "a micro-batch": f"{model.constant * 1e3:.4g} ms",
        "a: a slot": f"{model.per_token * 1e6:.4g} µs",
        "b: a squared length": f"{model.per_squared_length * 1e9:.4g} ns",
        **({"a segment": f"{model.per_segment * 1e6:.4g} µs"} if model.per_segment else {}),
        **({"a step (optimizer)": f"{model.per_step * 1e3:.4g} ms"} if model.per_step else {}),
        "a length at which attention costs as much as all else": _crossing(model),
        "error on held-out micro-batches": f"median {console.percent(model.held_out_median_error)}, 95 % within "
        f"{console.percent(model.held_out_95_percent_error)}",
        "noise": console.percent(model.noise)
        + ("" if model.repeat_noise is None else f", of repeats {console.percent(model.repeat_noise)}"),
        "measured": f"{model.samples} micro-batches; layers: {origin.layers}, and nothing is scaled to another number",
        "for the run file": "training.cost_model=FILE, the one that --cost-model writes",
    }
    return console.pairs(rows, title="Cost model: forward and backward of a micro-batch")


def _crossing(model: CostModel) -> str:
    if model.per_squared_length == 0.0:
        return "none"
    return f"{model.per_token / model.per_squared_length:,.0f}"


def _spread(spread: Spread, *, scale: float = 1.0, unit: str = "") -> str:
    median, low, high = (scale * value for value in (spread.median, spread.quartile_1, spread.quartile_3))
    return f"{median:.4g}{unit} ({low:.4g} to {high:.4g})"
