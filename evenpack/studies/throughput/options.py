"""The options of `evenpack study throughput`, as people write them."""

from pathlib import Path

from evenpack.config import nearest
from evenpack.errors import ConfigError
from evenpack.studies.packing.options import parse_depths
from evenpack.studies.plotting import require_plot
from evenpack.studies.throughput.clock import ClockName
from evenpack.studies.throughput.contenders import DEPTHS, LAYOUTS, parse_forms
from evenpack.studies.throughput.study import ThroughputOptions

_CLOCKS: tuple[ClockName, ...] = ("wall", "cpu")


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
