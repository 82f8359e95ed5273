"""The options of `evenpack study throughput`, as they are typed."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from evenpack.studies.shared_options import Clock, Plot


@dataclass(frozen=True, kw_only=True)
class ThroughputArguments:
    """Fields are options of the command line; nothing is checked yet."""

    layouts: Annotated[str | None, typer.Option(help="Default: padded,unpadded,packed.", show_default=False)] = None
    depths: Annotated[
        str | None,
        typer.Option(
            help="Most sequences a pack may hold. Default: 1,2,3,4,8,none; '': leave out.", show_default=False
        ),
    ] = None
    rounds: Annotated[int, typer.Option(help="Timed steps of each layout and depth.")] = 10
    warmup: Annotated[int, typer.Option(help="Warm-up steps.")] = 2
    samples: Annotated[int, typer.Option(help="Further micro-batches, for the cost model; 0: fit none.")] = 40
    clock: Clock = "wall"
    cost_model: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Write the cost model.", show_default=False)
    ] = None
    plot: Plot = None
