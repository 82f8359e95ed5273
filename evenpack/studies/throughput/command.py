"""The command `evenpack study throughput`: its options, and what it does with them."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from evenpack.console import Report
from evenpack.errors import ConfigError
from evenpack.studies.shared_options import Plot

if TYPE_CHECKING:
    from evenpack.engine.config import RunConfig
    from evenpack.studies.throughput.study import ThroughputOptions


@dataclass(frozen=True, kw_only=True)
class ThroughputCommand:
    """Time steps of a prepared run in each layout and at each packing depth, and fit a cost model.

    It runs on the available device and saves nothing of the training. For several ranks see docs/gpu.md.

    \b
    Examples:
      evenpack study throughput demo --plot throughput.png
      evenpack study throughput RUN.yaml --layouts padded,packed --depths '' --rounds 3
      evenpack study throughput RUN.yaml --cost-model h100.json training.packs_per_step=32
    """

    layouts: Annotated[str | None, typer.Option(help="Default: padded,unpadded,packed.")] = None
    depths: Annotated[
        str | None, typer.Option(help="Most sequences a pack may hold. Default: 1,2,3,4,8,none; '': leave out.")
    ] = None
    rounds: Annotated[int, typer.Option(min=1, help="Timed steps of each layout and depth.")] = 10
    warmup: Annotated[int, typer.Option(min=0, help="Warm-up steps.")] = 2
    samples: Annotated[int, typer.Option(min=0, help="Further micro-batches, for the cost model; 0: fit none.")] = 40
    clock: Annotated[
        Literal["wall", "cpu"],
        typer.Option(help="wall, or cpu: seconds of this process only, for a busy machine with OMP_NUM_THREADS=1."),
    ] = "wall"
    cost_model: Annotated[Path | None, typer.Option(metavar="FILE.json", help="Write the cost model.")] = None
    plot: Plot = None

    def run(self, config: "RunConfig") -> Report:
        """Runs on every rank; one of them shows the results. Raises: as `options` and `study_throughput`."""
        from evenpack import console
        from evenpack.engine.world.distributed import configure_logging, joined_world
        from evenpack.progress import Progress
        from evenpack.studies.throughput.presentation import plot_throughput, throughput_tables
        from evenpack.studies.throughput.study import study_throughput

        options = self.options()
        with joined_world() as world, Progress(console.messages(), silent=not world.is_main) as progress:
            configure_logging(world)
            study = study_throughput(config, world, options, progress=progress)
        report = Report(value=study, shown=throughput_tables(study), is_silent=not world.is_main)
        if report.is_silent:
            return report
        if self.plot is not None:
            plot_throughput(study, self.plot)
            report.shown.append(console.text(f"Drew {self.plot}"))
        if self.cost_model is not None and study.cost_model is not None:
            study.cost_model.write(self.cost_model)
            report.shown.append(console.text(f"Wrote {self.cost_model}"))
        elif self.cost_model is not None:
            report.unmet = f"{self.cost_model} was not written: {study.cost_model_refusal}"
        return report

    def options(self) -> "ThroughputOptions":
        """Parses the options.

        Raises: ConfigError for values that cannot be measured, drawn or written, before anything is read.
        """
        from evenpack.studies.packing.study import parse_depths
        from evenpack.studies.plotting import require_plot
        from evenpack.studies.throughput.contenders import DEPTHS, LAYOUTS, parse_forms
        from evenpack.studies.throughput.study import ThroughputOptions

        require_plot(self.plot)
        if self.cost_model is not None:
            _require_cost_model(self.cost_model, self.samples)
        depths = self.depths
        return ThroughputOptions(
            layouts=parse_forms(self.layouts or ",".join(LAYOUTS)),
            depths=DEPTHS if depths is None else () if depths == "" else tuple(dict.fromkeys(parse_depths(depths))),
            rounds=self.rounds,
            warmup=self.warmup,
            samples=self.samples,
            clock=self.clock,
        )


def _require_cost_model(path: Path, samples: int) -> None:
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--cost-model {path}: there is no folder {path.absolute().parent}; create it first")
    if samples == 0:
        raise ConfigError("--cost-model needs --samples: with 0 of them no cost model is fitted")
