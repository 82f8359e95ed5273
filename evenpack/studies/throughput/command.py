"""`evenpack study throughput`."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evenpack.console import Report
from evenpack.studies.shared_options import Clock, Plot

if TYPE_CHECKING:
    from evenpack.engine.config import RunConfig


@dataclass(frozen=True, kw_only=True)
class ThroughputCommand:
    """Time steps of a prepared run in each layout and at each packing depth, and fit a cost model.

    On the device that is there. Nothing is saved of the training. Several ranks: see docs/throughput.md.

    \b
    Examples:
      evenpack study throughput configs/demo.yaml --plot throughput.png
      evenpack study throughput RUN.yaml --layouts padded,packed --depths '' --rounds 3
      evenpack study throughput RUN.yaml --cost-model h100.json training.packs_per_step=32
    """

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

    def run(self, config: "RunConfig") -> Report:
        """On every rank; one of them shows what was found. Raises: as `parse_options` and `study_throughput`."""
        from evenpack.studies.throughput.measured import measure_run
        from evenpack.studies.throughput.options import parse_options

        return measure_run(config, parse_options(self), plot=self.plot, cost_model=self.cost_model)
