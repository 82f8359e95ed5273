"""The options of `evenpack study forecast`, as they are typed."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from evenpack.studies.shared_options import Clock, Plot


@dataclass(frozen=True, kw_only=True)
class ForecastArguments:
    """Fields are options of the command line; nothing is checked yet."""

    ranks: Annotated[str, typer.Option(help="Numbers of ranks to predict.")] = "2,4,8"
    layouts: Annotated[str, typer.Option(help="Layouts, as in study throughput.")] = "unpadded/arrival"
    steps: Annotated[int, typer.Option(help="Steps timed at each number of ranks.")] = 30
    fit_steps: Annotated[int, typer.Option(help="Steps of one rank on which the forecasts are based.")] = 120
    warmup: Annotated[int, typer.Option(help="Warm-up steps of one rank, and of the log.")] = 3
    simulated_steps: Annotated[int, typer.Option(help="Simulated steps for the forecast by the cost model.")] = 200
    clock: Clock = "wall"
    log: Annotated[
        Path | None,
        typer.Option(
            metavar="metrics.jsonl",
            help="Log of a real run on several ranks, with as many rows per rank in one of the layouts.",
            show_default=False,
        ),
    ] = None
    plot: Plot = None
