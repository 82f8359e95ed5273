"""What is given to `evenpack study forecast`, as people write it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from evenpack.studies.shared_options import Clock


@dataclass(frozen=True, kw_only=True)
class ForecastArguments:
    """A field is an option of the command line; nothing of it has been checked."""

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
