"""What is given to `evenpack study imbalance`, as people write it."""

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
    """A field is an option of the command line; nothing of it has been checked."""

    devices: Annotated[
        str, typer.Option(metavar="LIST", help="1..2048: powers of two; or a list: 1,8,24.", rich_help_panel=_CLUSTER)
    ] = "1..2048"
    batch: Annotated[int, typer.Option(help="Sequences of a micro-batch.", rich_help_panel=_CLUSTER)] = 32
    packs: Annotated[
        int | None,
        typer.Option(
            help="Packs of a micro-batch. Default: as many as hold --batch sequences on average.",
            show_default=False,
            rich_help_panel=_CLUSTER,
        ),
    ] = None
    accumulation: Annotated[int, typer.Option(help="Micro-batches of a step and device.", rich_help_panel=_CLUSTER)] = 1
    zero_stage: Annotated[
        int, typer.Option(help="At 2 and 3 devices wait in every micro-batch.", rich_help_panel=_CLUSTER)
    ] = 0
    steps: Annotated[int, typer.Option(help="Of every cluster.", rich_help_panel=_CLUSTER)] = 1000
    cost_model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE.json",
            help="Seconds of a micro-batch: of `study throughput --cost-model`, or one that comes with evenpack. "
            "Default: an estimate of the run's model, or bert_large_estimate where INPUT is no run.",
            show_default=False,
            rich_help_panel=_CLUSTER,
        ),
    ] = None
    causal: Annotated[
        bool | None,
        typer.Option(
            "--causal/--bidirectional",
            help="Attention of padded rows: all of the row, or the sequence and its padding apart. "
            "Default: as the cost model's model has it.",
            show_default=False,
            rich_help_panel=_CLUSTER,
        ),
    ] = None
    noise: Annotated[
        bool,
        typer.Option("--noise", help="Scatter micro-batches as the cost model was off.", rich_help_panel=_CLUSTER),
    ] = False
    all_reduce_bytes: Annotated[
        float,
        typer.Option(help="Of gradients, reduced in a ring after computing; 0: leave out.", rich_help_panel=_CLUSTER),
    ] = 0.0
    bandwidth: Annotated[
        float | None,
        typer.Option(metavar="GB/S", help="Of a device's link.", show_default=False, rich_help_panel=_CLUSTER),
    ] = None
    seed: Annotated[int, typer.Option(help="Of the draws.", rich_help_panel=_CLUSTER)] = 0
    reference_location: Annotated[
        float, typer.Option(help="Of the Gumbel of a cluster's speed-up.", rich_help_panel=_REFERENCE)
    ] = 1.6038
    reference_scale: Annotated[float, typer.Option(help="Of the same.", rich_help_panel=_REFERENCE)] = 0.1288
    reference_devices: Annotated[int, typer.Option(help="Of that cluster.", rich_help_panel=_REFERENCE)] = 8
    log: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Steps of un-padded training: metrics.jsonl, an MLPerf log with 'seq/s', or a CSV.",
            show_default=False,
            rich_help_panel=_LOG,
        ),
    ] = None
    log_devices: Annotated[int, typer.Option(help="That the log comes from.", rich_help_panel=_LOG)] = 8
    padded_baseline: Annotated[
        float | None,
        typer.Option(
            metavar="SEQ/S",
            help="Sequences a second of padded training on the same devices.",
            show_default=False,
            rich_help_panel=_LOG,
        ),
    ] = None
    log_column: Annotated[
        str | None,
        typer.Option(help="Of a CSV: its column of sequences a second.", show_default=False, rich_help_panel=_LOG),
    ] = None
    log_warmup: Annotated[
        int | None,
        typer.Option(help="Steps to cut at its start. Default: found.", show_default=False, rich_help_panel=_LOG),
    ] = None
    plot: Plot = None
    plot_steps: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.png", help="Draw the speed-ups of single steps beside their law.", show_default=False
        ),
    ] = None
