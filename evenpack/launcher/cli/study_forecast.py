"""`evenpack study forecast`."""

from pathlib import Path
from typing import Annotated

import typer

from evenpack.launcher.cli.arguments import AsJson, Overrides, RunFile, Save, load, reporting
from evenpack.launcher.cli.measuring import Clock, settle_rank


def study_forecast(
    run_file: RunFile,
    overrides: Overrides = None,
    *,
    ranks: Annotated[str, typer.Option(help="Numbers of ranks to predict.")] = "2,4,8",
    layouts: Annotated[str, typer.Option(help="As those of study throughput.")] = "unpadded/arrival",
    steps: Annotated[int, typer.Option(help="Steps timed at each number of ranks.")] = 30,
    fit_steps: Annotated[int, typer.Option(help="Steps of one rank that the forecasts are made from.")] = 120,
    warmup: Annotated[int, typer.Option(help="Steps of one rank before them; of the log, too.")] = 3,
    simulated_steps: Annotated[int, typer.Option(help="For the forecast by the cost model.")] = 200,
    clock: Clock = "wall",
    log: Annotated[
        Path | None,
        typer.Option(
            metavar="metrics.jsonl", help="Of a real run on several ranks, to stand beside.", show_default=False
        ),
    ] = None,
    save: Save = None,
    as_json: AsJson = False,
) -> None:
    """Check on one device how well one rank's times predict how long several ranks wait.

    Times the micro-batches of n ranks one after another, takes the slowest of each step, and compares that with what
    the times of a single rank, over other sequences, let expect.

    \b
    Examples:
      evenpack study forecast RUN.yaml
      evenpack study forecast RUN.yaml --ranks 2,8 --layouts unpadded/arrival,unpadded/sorted_serpentine --clock cpu
      evenpack study forecast RUN.yaml --log runs/two_ranks/metrics.jsonl
    """
    config = load(run_file, overrides)
    with reporting(as_json, save=save) as report:
        settle_rank()
        from evenpack.launcher.forecast_view import forecast_run, parse_options, read_log

        options = parse_options(
            layouts=layouts,
            ranks=ranks,
            steps=steps,
            fit_steps=fit_steps,
            warmup=warmup,
            simulated_steps=simulated_steps,
            clock=clock,
        )
        logged = None if log is None else read_log(log, warmup=warmup)
        report.value, report.shown = forecast_run(config, options, logged=logged)
