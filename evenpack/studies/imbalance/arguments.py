"""The options of `evenpack study imbalance`, as they are typed."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from evenpack.studies.shared_options import Plot

_CLUSTER = "Simulated clusters"
_REFERENCE = "Published reference"
_REPLAY = "Clusters replayed on this device"
_LOG = "Measured steps"


@dataclass(frozen=True, kw_only=True)
class ImbalanceArguments:
    """Fields are options of the command line; nothing is checked yet."""

    devices: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="1..2048: powers of two; or a list: 1,8,24. Default: 1..2048, and the ranks of the run.",
            show_default=False,
            rich_help_panel=_CLUSTER,
        ),
    ] = None
    batch: Annotated[
        int | None,
        typer.Option(
            help="Sequences per micro-batch. Default: the run's, or as many as its packs hold on average; 32 where "
            "INPUT is not a run.",
            show_default=False,
            rich_help_panel=_CLUSTER,
        ),
    ] = None
    packs: Annotated[
        int | None,
        typer.Option(
            help="Packs per micro-batch. Default: the run's, or as many as hold --batch sequences on average.",
            show_default=False,
            rich_help_panel=_CLUSTER,
        ),
    ] = None
    accumulation: Annotated[
        int | None,
        typer.Option(
            help="Micro-batches per step and device. Default: the run's on the ranks that it had, else 1.",
            show_default=False,
            rich_help_panel=_CLUSTER,
        ),
    ] = None
    zero_stage: Annotated[
        int | None,
        typer.Option(
            help="ZeRO stage; at 2 and 3 devices wait in every micro-batch. Default: the run's, else 0.",
            show_default=False,
            rich_help_panel=_CLUSTER,
        ),
    ] = None
    steps: Annotated[int, typer.Option(help="Simulated steps per cluster.", rich_help_panel=_CLUSTER)] = 1000
    cost_model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE.json",
            help="Cost of a micro-batch: a file of `study throughput --cost-model`, or a shipped one. "
            "Default: the run's training.cost_model, else an estimate of its model; where INPUT is not a run, "
            "bert_large_estimate.",
            show_default=False,
            rich_help_panel=_CLUSTER,
        ),
    ] = None
    causal: Annotated[
        bool | None,
        typer.Option(
            "--causal/--bidirectional",
            help="Attention of padded rows: the whole row, or the sequence and its padding separately. "
            "Default: that of the cost model's model.",
            show_default=False,
            rich_help_panel=_CLUSTER,
        ),
    ] = None
    noise: Annotated[
        bool,
        typer.Option("--noise", help="Add the cost model's residual noise.", rich_help_panel=_CLUSTER),
    ] = False
    all_reduce_bytes: Annotated[
        float,
        typer.Option(help="Gradient bytes in a ring all-reduce after computing; 0: none.", rich_help_panel=_CLUSTER),
    ] = 0.0
    bandwidth: Annotated[
        float | None,
        typer.Option(metavar="GB/S", help="Bandwidth of a link.", show_default=False, rich_help_panel=_CLUSTER),
    ] = None
    seed: Annotated[int, typer.Option(help="Seed of the draws.", rich_help_panel=_CLUSTER)] = 0
    replay: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Numbers of devices, as in 1,8,64: compute every micro-batch that each of them would get, one after "
            "another, and take the slowest of each step. INPUT is a prepared run.",
            show_default=False,
            rich_help_panel=_REPLAY,
        ),
    ] = None
    replay_steps: Annotated[
        int,
        typer.Option(
            help="Steps of the largest number of devices; smaller ones get as many more as take the same sequences.",
            rich_help_panel=_REPLAY,
        ),
    ] = 8
    published: Annotated[
        bool | None,
        typer.Option(
            "--published/--no-published",
            help="Show the published curve of BERT-large. Default: beside the lengths that it is of (wikipedia_512).",
            show_default=False,
            rich_help_panel=_REFERENCE,
        ),
    ] = None
    reference_location: Annotated[
        float, typer.Option(help="Location of the Gumbel law of a cluster's speed-up.", rich_help_panel=_REFERENCE)
    ] = 1.6038
    reference_scale: Annotated[float, typer.Option(help="Scale of that law.", rich_help_panel=_REFERENCE)] = 0.1288
    reference_devices: Annotated[int, typer.Option(help="Devices of that cluster.", rich_help_panel=_REFERENCE)] = 8
    log: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Steps of un-padded training: metrics.jsonl, an MLPerf log with 'seq/s', or a CSV. Default: the "
            "run's own metrics.jsonl.",
            show_default=False,
            rich_help_panel=_LOG,
        ),
    ] = None
    log_devices: Annotated[
        int | None,
        typer.Option(
            help="Devices of the log's run, if the log does not say. Default: 8.",
            show_default=False,
            rich_help_panel=_LOG,
        ),
    ] = None
    baseline_run: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="Run over which the speed-up of the measured steps is: a run file or an output directory.",
            show_default=False,
            rich_help_panel=_LOG,
        ),
    ] = None
    padded_baseline: Annotated[
        float | None,
        typer.Option(
            metavar="SEQ/S",
            help="Sequences/s of padded training on the same devices.",
            show_default=False,
            rich_help_panel=_LOG,
        ),
    ] = None
    log_column: Annotated[
        str | None,
        typer.Option(help="Column of a CSV with sequences/s.", show_default=False, rich_help_panel=_LOG),
    ] = None
    log_warmup: Annotated[
        int | None,
        typer.Option(help="Warm-up steps to cut. Default: detected.", show_default=False, rich_help_panel=_LOG),
    ] = None
    plot: Plot = None
    plot_steps: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png", help="Draw the speed-ups of single steps and their law.", show_default=False),
    ] = None
