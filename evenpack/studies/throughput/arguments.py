"""What is given to `evenpack study throughput`, as people write it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from evenpack.studies.shared_options import Clock, Plot


@dataclass(frozen=True, kw_only=True)
class ThroughputArguments:
    """A field is an option of the command line; nothing of it has been checked."""

    layouts: Annotated[str | None, typer.Option(help="Default: padded,unpadded,packed.", show_default=False)] = None
    depths: Annotated[
        str | None,
        typer.Option(
            help="Most sequences a pack may hold. Default: 1,2,3,4,8,none; '': leave out.", show_default=False
        ),
    ] = None
    rounds: Annotated[int, typer.Option(help="Steps that count, of each layout and depth.")] = 10
    warmup: Annotated[int, typer.Option(help="Steps before them.")] = 2
    samples: Annotated[int, typer.Option(help="Further micro-batches, for the cost model; 0: none is fitted.")] = 40
    clock: Clock = "wall"
    cost_model: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Write the cost model.", show_default=False)
    ] = None
    plot: Plot = None
