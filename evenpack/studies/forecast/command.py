"""The command `evenpack study forecast`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from evenpack.console import Report
from evenpack.studies.forecast.arguments import ForecastArguments

if TYPE_CHECKING:
    from evenpack.engine.config import RunConfig


@dataclass(frozen=True, kw_only=True)
class ForecastCommand(ForecastArguments):
    """Check on one device how well one rank's times predict how long several ranks wait.

    Times the micro-batches of n ranks one after another, takes the slowest of each step, and compares that with the
    forecasts from the times of a single rank over other sequences.

    \b
    Examples:
      evenpack study forecast RUN.yaml
      evenpack study forecast RUN.yaml --ranks 2,8 --layouts unpadded/arrival,unpadded/sorted_serpentine --clock cpu
      evenpack study forecast RUN.yaml --log runs/two_ranks/metrics.jsonl --plot forecast.png
    """

    def run(self, config: "RunConfig") -> Report:
        """Runs the study on a single device. Raises: as `parse_options`, `read_log` and `forecast_run`."""
        from evenpack.studies.forecast.measured import forecast_run
        from evenpack.studies.forecast.options import parse_options, read_log

        options = parse_options(self)
        real = None if self.log is None else read_log(self.log, warmup=self.warmup)
        return forecast_run(config, options, real=real, plot=self.plot)
