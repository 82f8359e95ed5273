"""The options of `evenpack study imbalance`."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from evenpack.studies.shared_options import Plot

_of_clusters = partial(typer.Option, rich_help_panel="Simulated clusters")
_of_replay = partial(typer.Option, rich_help_panel="Clusters replayed on this device")
_of_log = partial(typer.Option, rich_help_panel="Measured steps")


@dataclass(frozen=True, kw_only=True)
class ImbalanceOptions:
    """What is simulated, replayed and compared."""

    devices: Annotated[
        str | None,
        _of_clusters(
            metavar="LIST",
            help="1..2048: powers of two; or a list: 1,8,24. Default: 1..2048, and the ranks of the run.",
        ),
    ] = None
    batch: Annotated[
        int | None,
        _of_clusters(
            help="Sequences per micro-batch. Default: the run's, or as many as its packs hold on average; 32 where "
            "INPUT is not a run."
        ),
    ] = None
    packs: Annotated[
        int | None,
        _of_clusters(
            help="Packs per micro-batch. Default: the run's, or as many as hold --batch sequences on average."
        ),
    ] = None
    accumulation: Annotated[
        int | None,
        _of_clusters(help="Micro-batches per step and device. Default: the run's on the ranks that it had, else 1."),
    ] = None
    zero_stage: Annotated[
        int | None,
        _of_clusters(help="ZeRO stage; at 2 and 3 devices wait in every micro-batch. Default: the run's, else 0."),
    ] = None
    steps: Annotated[int, _of_clusters(help="Simulated steps per cluster.")] = 1000
    cost_model: Annotated[
        str | None,
        _of_clusters(
            metavar="NAME|FILE.json",
            help="Cost of a micro-batch: a file of `study throughput --cost-model`, or a shipped one. "
            "Default: the run's training.cost_model, else an estimate of its model; where INPUT is not a run, "
            "bert_large_estimate.",
        ),
    ] = None
    seed: Annotated[int, _of_clusters(help="Seed of the draws.")] = 0
    replay: Annotated[
        str | None,
        _of_replay(
            metavar="LIST",
            help="Numbers of devices, as in 1,8,64: compute every micro-batch that each of them would get, one after "
            "another, and take the slowest of each step. INPUT is a prepared run.",
        ),
    ] = None
    replay_steps: Annotated[
        int,
        _of_replay(
            min=2,  # an interval needs two
            help="Steps of the largest number of devices; smaller ones get as many more as take the same sequences.",
        ),
    ] = 8
    log: Annotated[
        list[Path] | None,
        _of_log(
            metavar="FILE",
            help="Steps of un-padded training: metrics.jsonl or an MLPerf log; repeated for several runs of "
            "one system, or a folder of them. Default: the run's own metrics.jsonl.",
        ),
    ] = None
    regime_steps: Annotated[
        int | None,
        _of_log(
            help="Steps after which every rank reads another shard, so that the rate has another level. Default: where "
            "the level is found to change."
        ),
    ] = None
    log_devices: Annotated[
        int | None, _of_log(min=1, help="Devices of the log's run, if the log does not say. Default: 8.")
    ] = None
    baseline_run: Annotated[
        Path | None,
        _of_log(
            metavar="RUN",
            help="Run with which the measured steps are compared: a run file, an output directory, or a log of padded "
            "steps.",
        ),
    ] = None
    plot: Plot = None
