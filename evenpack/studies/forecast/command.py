"""`evenpack study forecast`."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evenpack.console import Report
from evenpack.studies.shared_options import Clock

if TYPE_CHECKING:
    from evenpack.engine.config import RunConfig


@dataclass(frozen=True, kw_only=True)
class ForecastCommand:
    """Check on one device how well one rank's times predict how long several ranks wait.

    Times the micro-batches of n ranks one after another, takes the slowest of each step, and compares that with what
    the times of a single rank, over other sequences, let expect.

    \b
    Examples:
      evenpack study forecast RUN.yaml
      evenpack study forecast RUN.yaml --ranks 2,8 --layouts unpadded/arrival,unpadded/sorted_serpentine --clock cpu
      evenpack study forecast RUN.yaml --log runs/two_ranks/metrics.jsonl
    """

    ranks: Annotated[str, typer.Option(help="Numbers of ranks to predict.")] = "2,4,8"
    layouts: Annotated[str, typer.Option(help="As those of study throughput.")] = "unpadded/arrival"
    steps: Annotated[int, typer.Option(help="Steps timed at each number of ranks.")] = 30
    fit_steps: Annotated[int, typer.Option(help="Steps of one rank that the forecasts are made from.")] = 120
    warmup: Annotated[int, typer.Option(help="Steps of one rank before them; of the log, too.")] = 3
    simulated_steps: Annotated[int, typer.Option(help="For the forecast by the cost model.")] = 200
    clock: Clock = "wall"
    log: Annotated[
        Path | None,
        typer.Option(
            metavar="metrics.jsonl", help="Of a real run on several ranks, to stand beside.", show_default=False
        ),
    ] = None

    def run(self, config: "RunConfig") -> Report:
        """On one device alone. Raises: as `parse_options`, `read_log` and `study_forecast`."""
        from evenpack.studies.forecast.measured import forecast_run
        from evenpack.studies.forecast.options import parse_options, read_log

        options = parse_options(self)
        logged = None if self.log is None else read_log(self.log, warmup=self.warmup)
        return forecast_run(config, options, logged=logged)
