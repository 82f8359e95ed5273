"""`evenpack study ...`: the commands of the benchmarking layer."""

import os
from pathlib import Path
from typing import Annotated

import typer

from evenpack.launcher.cli.arguments import (
    SETTINGS,
    AsJson,
    LengthsInput,
    Overrides,
    Plot,
    RunFile,
    Save,
    load,
    reporting,
)
from evenpack.launcher.cli.subject_options import takes, takes_subject
from evenpack.studies.imbalance.options import ImbalanceOptions
from evenpack.studies.lengths.options import SubjectOptions

Clock = Annotated[
    str,
    typer.Option(help="wall, or cpu: seconds of this process alone, on a busy machine with OMP_NUM_THREADS=1."),
]

study_app = typer.Typer(help="Compare: the benchmarking layer.", no_args_is_help=True, context_settings=SETTINGS)


@study_app.command("packing")
@takes_subject
def study_packing(
    lengths: LengthsInput,
    overrides: Overrides = None,
    *,
    options: SubjectOptions,
    depths: Annotated[
        str | None, typer.Option(help="Most sequences a pack may hold: 2,3,none.", show_default=False)
    ] = None,
    algorithms: Annotated[
        str | None,
        typer.Option(help="cutting_stock,least_squares:weight=0. Default: all, where of use.", show_default=False),
    ] = None,
    sample: Annotated[
        int | None, typer.Option(help="Pack so many sequences, drawn at random, in place of all.", show_default=False)
    ] = None,
    plot: Plot = None,
    save: Save = None,
    as_json: AsJson = False,
) -> None:
    """Compare packing algorithms over depths.

    \b
    Examples:
      evenpack study packing wikipedia_512 --plot packing.png
      evenpack study packing lengths.npy --pack-length 2048 --algorithms longest_pack_first,cutting_stock
    """
    with reporting(as_json, save=save) as report:
        from evenpack.studies.lengths.subject import find_subject
        from evenpack.studies.packing.command import study_subject
        from evenpack.studies.packing.options import parse_choices, parse_depths

        limits, choices = parse_depths(depths), parse_choices(algorithms)  # before anything is read
        subject = find_subject(lengths, overrides or [], options)
        report.value, report.shown = study_subject(subject, depths=limits, choices=choices, sample=sample, plot=plot)


@study_app.command("imbalance")
@takes_subject
@takes("study", ImbalanceOptions)
def study_imbalance(
    lengths: LengthsInput,
    overrides: Overrides = None,
    *,
    options: SubjectOptions,
    study: ImbalanceOptions,
    plot: Plot = None,
    save: Save = None,
    as_json: AsJson = False,
) -> None:
    """Compare packs with un-padding and padding on one device to thousands, where each step waits for the slowest.

    Clusters are simulated on the lengths; beside them stand the published curve and, if given, a log.

    \b
    Examples:
      evenpack study imbalance wikipedia_512 --devices 1..2048 --plot imbalance.png --save imbalance.json
      evenpack study imbalance wikipedia_1024 --cost-model gpt2_xl_estimate --devices 8,64,512
      evenpack study imbalance RUN.yaml --cost-model h100.json --all-reduce-bytes 6.7e8 --bandwidth 100
      evenpack study imbalance wikipedia_512 --log result_0.txt --padded-baseline 1130
    """
    with reporting(as_json, save=save) as report:
        from evenpack.studies.imbalance.command import ImbalanceRequest
        from evenpack.studies.imbalance.command import study_imbalance as compare
        from evenpack.studies.lengths.subject import find_subject

        request = ImbalanceRequest(study, plot=plot)  # before anything is read
        report.value, report.shown = compare(find_subject(lengths, overrides or [], options), request)


@study_app.command("throughput")
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
        _settle()
        from evenpack.studies.throughput.command import measure_run
        from evenpack.studies.throughput.options import parse_options

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


@study_app.command("forecast")
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
        _settle()
        from evenpack.studies.forecast.command import forecast_run
        from evenpack.studies.forecast.options import parse_options, read_log

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


def _settle() -> None:
    """Shares this machine's cores among its ranks and chooses the accelerator: before torch and DeepSpeed are there."""
    from evenpack.launcher.processes.devices import settle_accelerator
    from evenpack.launcher.processes.ranks import RankPlace
    from evenpack.launcher.worker import share_cores

    share_cores(RankPlace.of_environment(os.environ))
    settle_accelerator()
