"""Parses the options of `evenpack study throughput`."""

from pathlib import Path

from evenpack.config import nearest
from evenpack.errors import ConfigError
from evenpack.studies.packing.options import parse_depths
from evenpack.studies.plotting import require_plot
from evenpack.studies.throughput.arguments import ThroughputArguments
from evenpack.studies.throughput.clock import ClockName
from evenpack.studies.throughput.contenders import DEPTHS, LAYOUTS, parse_forms
from evenpack.studies.throughput.study import ThroughputOptions

_CLOCKS: tuple[ClockName, ...] = ("wall", "cpu")


def parse_options(command: ThroughputArguments) -> ThroughputOptions:
    """Parses the options.

    Raises: ConfigError for values that cannot be measured, drawn or written, before anything is read.
    """
    if command.plot is not None:
        require_plot(command.plot)
    if command.cost_model is not None:
        _require_cost_model(command.cost_model, command.samples)
    depths = command.depths
    return ThroughputOptions(
        layouts=parse_forms(command.layouts or ",".join(LAYOUTS)),
        depths=DEPTHS if depths is None else () if depths == "" else tuple(dict.fromkeys(parse_depths(depths))),
        rounds=command.rounds,
        warmup=command.warmup,
        samples=command.samples,
        clock=parse_clock(command.clock),
    )


def _require_cost_model(path: Path, samples: int) -> None:
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--cost-model {path}: there is no folder {path.absolute().parent}; create it first")
    if samples == 0:
        raise ConfigError("--cost-model needs --samples: with 0 of them no cost model is fitted")


def parse_clock(given: str) -> ClockName:
    """Parses the clock. Raises: ConfigError for another word."""
    for name in _CLOCKS:
        if name == given:
            return name
    raise ConfigError(f"--clock {given}: there is no such clock; {nearest(given, _CLOCKS)}")
