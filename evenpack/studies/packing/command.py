"""The command `evenpack study packing`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from evenpack.console import Report
from evenpack.studies.shared_options import Plot

if TYPE_CHECKING:
    from evenpack.studies.lengths.subject import Subject


@dataclass(frozen=True, kw_only=True)
class PackingCommand:
    """Compare packing algorithms over depths.

    \b
    Examples:
      evenpack study packing wikipedia_512 --plot packing.png
      evenpack study packing glue:cola --algorithms shortest_pack_first
      evenpack study packing lengths.npy --pack-length 2048 --algorithms longest_pack_first,cutting_stock
    """

    depths: Annotated[
        str | None, typer.Option(help="Most sequences a pack may hold: 2,3,none.", show_default=False)
    ] = None
    algorithms: Annotated[
        str | None,
        typer.Option(help="cutting_stock,least_squares:weight=0. Default: all that apply.", show_default=False),
    ] = None
    sample: Annotated[
        int | None, typer.Option(help="Pack so many random sequences instead of all.", show_default=False)
    ] = None
    plot: Plot = None

    def uses_device(self) -> bool:
        """Returns False: lengths are enough."""
        return False

    def run(self, find_subject: "Callable[[], Subject]") -> Report:
        """Checks the options before reading the lengths. Raises: as `study_subject` and the parsers of options."""
        from evenpack.studies.packing.options import parse_choices, parse_depths
        from evenpack.studies.packing.study import study_subject

        depths, choices = parse_depths(self.depths), parse_choices(self.algorithms)
        value, shown = study_subject(find_subject(), depths=depths, choices=choices, sample=self.sample, plot=self.plot)
        return Report(value=value, shown=shown)
