"""The command `evenpack study residuals`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from evenpack.console import Report
from evenpack.studies.shared_options import Plot

if TYPE_CHECKING:
    from evenpack.studies.lengths.subject import Subject


@dataclass(frozen=True, kw_only=True)
class ResidualsCommand:
    """Search the residual weights of least squares packing, and show the residual of each by length.

    A search is one solution for each pair of weight and length: half a minute each at 512 slots.

    \b
    Examples:
      evenpack study residuals squad_1_1_384 --weights 1,0.09,0.002 --up-to 8,64 --plot residuals.png
      evenpack study residuals wikipedia_512 --save residuals.json
    """

    weights: Annotated[
        str, typer.Option(metavar="LIST", help="Weights of the residual of short lengths; other lengths weigh 1.")
    ] = "1,0.09,0"
    up_to: Annotated[str, typer.Option(metavar="LIST", help="Lengths up to which a weight applies.")] = "8,16"
    depth: Annotated[int, typer.Option(help="Most sequences a pack may hold.")] = 3
    plot: Plot = None

    def uses_device(self) -> bool:
        """Returns False: lengths are enough."""
        return False

    def run(self, find_subject: "Callable[[], Subject]") -> Report:
        """Checks the options before reading the lengths. Raises: as `ResidualsRequest` and `study_residuals`."""
        from evenpack.studies.residuals.study import ResidualsRequest, study_residuals

        request = ResidualsRequest(self)
        value, shown = study_residuals(find_subject(), request)
        return Report(value=value, shown=shown)
