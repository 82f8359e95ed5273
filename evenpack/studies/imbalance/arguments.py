"""The options of `evenpack study imbalance`, as they are typed."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from evenpack.studies.shared_options import Plot

_CLUSTER = "Simulated clusters"
_REFERENCE = "Published reference"
_LOG = "Measured log"


@dataclass(frozen=True, kw_only=True)
class ImbalanceArguments:
    """Fields are options of the command line; nothing is checked yet."""

    devices: Annotated[
        str, typer.Option(metavar="LIST", help="1..2048: powers of two; or a list: 1,8,24.", rich_help_panel=_CLUSTER)
    ] = "1..2048"
    batch: Annotated[int, typer.Option(help="Sequences per micro-batch.", rich_help_panel=_CLUSTER)] = 32
    packs: Annotated[
        int | None,
        typer.Option(
            help="Packs per micro-batch. Default: as many as hold --batch sequences on average.",
            show_default=False,
            rich_help_panel=_CLUSTER,
        ),
    ] = None
    accumulation: Annotated[int, typer.Option(help="Micro-batches per step and device.", rich_help_panel=_CLUSTER)] = 1
    zero_stage: Annotated[
        int, typer.Option(help="ZeRO stage; at 2 and 3 devices wait in every micro-batch.", rich_help_panel=_CLUSTER)
    ] = 0
    steps: Annotated[int, typer.Option(help="Simulated steps per cluster.", rich_help_panel=_CLUSTER)] = 1000
    cost_model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE.json",
            help="Cost of a micro-batch: a file of `study throughput --cost-model`, or a shipped one. "
            "Default: an estimate of the run's model, or bert_large_estimate where INPUT is not a run.",
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
    reference_location: Annotated[
        float, typer.Option(help="Location of the Gumbel law of a cluster's speed-up.", rich_help_panel=_REFERENCE)
    ] = 1.6038
    reference_scale: Annotated[float, typer.Option(help="Scale of that law.", rich_help_panel=_REFERENCE)] = 0.1288
    reference_devices: Annotated[int, typer.Option(help="Devices of that cluster.", rich_help_panel=_REFERENCE)] = 8
    log: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Steps of un-padded training: metrics.jsonl, an MLPerf log with 'seq/s', or a CSV.",
            show_default=False,
            rich_help_panel=_LOG,
        ),
    ] = None
    log_devices: Annotated[int, typer.Option(help="Devices of the log's run.", rich_help_panel=_LOG)] = 8
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
