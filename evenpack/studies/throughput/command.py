"""The command `evenpack study throughput`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from evenpack.console import Report
from evenpack.studies.throughput.arguments import ThroughputArguments

if TYPE_CHECKING:
    from evenpack.engine.config import RunConfig


@dataclass(frozen=True, kw_only=True)
class ThroughputCommand(ThroughputArguments):
    """Time steps of a prepared run in each layout and at each packing depth, and fit a cost model.

    It runs on the available device and saves nothing of the training. For several ranks see docs/throughput.md.

    \b
    Examples:
      evenpack study throughput demo --plot throughput.png
      evenpack study throughput RUN.yaml --layouts padded,packed --depths '' --rounds 3
      evenpack study throughput RUN.yaml --cost-model h100.json training.packs_per_step=32
    """

    def run(self, config: "RunConfig") -> Report:
        """Runs on every rank; one of them shows the results. Raises: as `parse_options` and `study_throughput`."""
        from evenpack.studies.throughput.measured import measure_run
        from evenpack.studies.throughput.options import parse_options

        return measure_run(config, parse_options(self), plot=self.plot, cost_model=self.cost_model)
