"""`evenpack study throughput`."""

from pathlib import Path
from typing import Annotated

import typer

from evenpack.launcher.cli.arguments import AsJson, Overrides, Plot, RunFile, Save, load, reporting
from evenpack.launcher.cli.measuring import Clock, settle_rank


def study_throughput(
    run_file: RunFile,
    overrides: Overrides = None,
    *,
    layouts: Annotated[str | None, typer.Option(help="Default: padded,unpadded,packed.", show_default=False)] = None,
    depths: Annotated[
        str | None,
        typer.Option(
            help="Most sequences a pack may hold. Default: 1,2,3,4,8,none; '': leave out.", show_default=False
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(help="Steps that count, of each layout and depth.")] = 10,
    warmup: Annotated[int, typer.Option(help="Steps before them.")] = 2,
    samples: Annotated[int, typer.Option(help="Further micro-batches, for the cost model; 0: none is fitted.")] = 40,
    clock: Clock = "wall",
    cost_model: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Write the cost model.", show_default=False)
    ] = None,
    plot: Plot = None,
    save: Save = None,
    as_json: AsJson = False,
) -> None:
    """Time steps of a prepared run in each layout and at each packing depth, and fit a cost model.

    On the device that is there. Nothing is saved of the training. Several ranks: see docs/throughput.md.

    \b
    Examples:
      evenpack study throughput configs/demo.yaml --plot throughput.png
      evenpack study throughput RUN.yaml --layouts padded,packed --depths '' --rounds 3
      evenpack study throughput RUN.yaml --cost-model h100.json training.packs_per_step=32
    """
    config = load(run_file, overrides)
    with reporting(as_json, save=save) as report:
        settle_rank()
        from evenpack.launcher.throughput_view import measure_run, parse_options

        options = parse_options(
            layouts=layouts,
            depths=depths,
            rounds=rounds,
            warmup=warmup,
            samples=samples,
            clock=clock,
            plot=plot,
            cost_model=cost_model,
        )
        report.value, report.shown, world = measure_run(config, options, plot=plot, cost_model=cost_model)
        report.is_silent = not world.is_main
        if cost_model is not None and report.value.cost_model is None:
            report.unmet = f"{cost_model} was not written: {report.value.cost_model_refusal}"
