"""The command `evenpack study roofline`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from evenpack.console import Report
from evenpack.studies.shared_options import Plot

if TYPE_CHECKING:
    from evenpack.engine.config import RunConfig


@dataclass(frozen=True, kw_only=True)
class RooflineCommand:
    """Estimate the time of a step on a GPU from its operations, bytes and kernels, part by part. Nothing is measured.

    Without prepared data packs are taken as full of the longest sequences. What the estimate assumes is in
    docs/roofline.md.

    \b
    Examples:
      evenpack study roofline RUN.yaml --device h100
      evenpack study roofline gpt2_xl --devices 8 --goal 50000 data.sources.web.path=web/ --vocabulary-size 50257
      evenpack study roofline RUN.yaml --plot roofline.png --save roofline.json
    """

    device: Annotated[
        str, typer.Option(metavar="NAME", help="A GPU with known peaks: h100, b200, a100-80gb, rtx-4090, ...")
    ] = "h100"
    devices: Annotated[int, typer.Option(help="Devices that divide a step; the step of one of them is shown.")] = 1
    goal: Annotated[float | None, typer.Option(metavar="TOKENS/S", help="Rate of one device that is wanted.")] = None
    vocabulary_size: Annotated[
        int | None, typer.Option(min=2, help="Vocabulary size of unprepared data. Default: the tokenizer's.")
    ] = None
    plot: Plot = None

    def run(self, config: "RunConfig") -> Report:
        """Computes and shows the roofline. Raises: as `study_roofline`."""
        from evenpack import console
        from evenpack.studies.plotting import require_plot
        from evenpack.studies.roofline.presentation import plot_roofline, roofline_tables
        from evenpack.studies.roofline.study import study_roofline

        require_plot(self.plot)
        found = study_roofline(config, self)
        shown = roofline_tables(found)
        if self.plot is not None:
            plot_roofline(found, self.plot)
            shown.append(console.text(f"Drew {self.plot}"))
        return Report(value=found, shown=shown)
