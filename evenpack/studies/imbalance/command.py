"""The command `evenpack study imbalance`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evenpack.console import Report
from evenpack.studies.shared_options import Plot

if TYPE_CHECKING:
    from evenpack.studies.lengths.subject import Subject

_of_clusters = partial(typer.Option, rich_help_panel="Simulated clusters")
_of_replay = partial(typer.Option, rich_help_panel="Clusters replayed on this device")
_of_reference = partial(typer.Option, rich_help_panel="Published reference")
_of_log = partial(typer.Option, rich_help_panel="Measured steps")


@dataclass(frozen=True, kw_only=True)
class ImbalanceCommand:
    """Compare packs with un-padding and padding on one device to thousands, where each step waits for the slowest.

    Clusters are simulated on the lengths. For a run, micro-batch, accumulation, ZeRO stage, ranks and model are its own
    unless an option says otherwise, and the steps that it logged are compared with the steps of --baseline-run. With
    --replay, this device computes what every device of a cluster would, one after another.

    \b
    Examples:
      evenpack study imbalance wikipedia_512 --devices 1..2048 --plot imbalance.png --save imbalance.json
      evenpack study imbalance wikipedia_512 --devices 8 --plot-steps steps.png
      evenpack study imbalance wikipedia_512 --noise published
      evenpack study imbalance wikipedia_1024 --cost-model gpt2_xl_estimate --devices 8,64,512
      evenpack study imbalance RUN.yaml --baseline-run PADDED.yaml --plot imbalance.png
      evenpack study imbalance RUN.yaml --replay 1,8,64 --plot imbalance.png
      evenpack study imbalance RUN.yaml --cost-model h100.json --all-reduce-bytes 6.7e8 --bandwidth 100
      evenpack study imbalance wikipedia_512 --log result_0.txt --padded-baseline 1130
    """

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
    causal: Annotated[
        bool | None,
        _of_clusters(
            "--causal/--bidirectional",
            help="Attention of padded rows: the whole row, or the sequence and its padding separately. "
            "Default: as the cost model's model is.",
        ),
    ] = None
    noise: Annotated[
        str,
        _of_clusters(
            metavar="SHARE|cost_model|published",
            help="Noise of a micro-batch's seconds: a share of them, the residual of the cost model, or what makes "
            "single un-padded steps vary as the published law of a cluster does.",
        ),
    ] = "0"
    all_reduce_bytes: Annotated[
        float, _of_clusters(help="Gradient bytes in a ring all-reduce after computing; 0: none.")
    ] = 0.0
    bandwidth: Annotated[float | None, _of_clusters(metavar="GB/S", help="Bandwidth of a link.")] = None
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
            help="Steps of the largest number of devices; smaller ones get as many more as take the same sequences."
        ),
    ] = 8
    published: Annotated[
        bool | None,
        _of_reference(
            "--published/--no-published",
            help="Show the published curve of BERT-large. Default: with the lengths of its figure (wikipedia_512).",
        ),
    ] = None
    reference_location: Annotated[float, _of_reference(help="Location of the Gumbel law of a cluster's speed-up.")] = (
        1.6038
    )
    reference_scale: Annotated[float, _of_reference(help="Scale of that law.")] = 0.1288
    reference_devices: Annotated[int, _of_reference(help="Devices of that cluster.")] = 8
    log: Annotated[
        Path | None,
        _of_log(
            metavar="FILE",
            help="Steps of un-padded training: metrics.jsonl, an MLPerf log with 'seq/s', or a CSV. Default: the "
            "run's own metrics.jsonl.",
        ),
    ] = None
    log_devices: Annotated[
        int | None, _of_log(help="Devices of the log's run, if the log does not say. Default: 8.")
    ] = None
    baseline_run: Annotated[
        Path | None,
        _of_log(
            metavar="RUN",
            help="Run with which the measured steps are compared: a run file or an output directory.",
        ),
    ] = None
    padded_baseline: Annotated[
        float | None, _of_log(metavar="SEQ/S", help="Sequences/s of padded training on the same devices.")
    ] = None
    log_column: Annotated[str | None, _of_log(help="Column of a CSV with sequences/s.")] = None
    log_warmup: Annotated[int | None, _of_log(help="Warm-up steps to cut. Default: detected.")] = None
    plot: Plot = None
    plot_steps: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw the speed-ups of single steps and their law.")
    ] = None

    def uses_device(self) -> bool:
        """Returns whether clusters are to be replayed."""
        return self.replay is not None

    def run(self, find_subject: "Callable[[], Subject]") -> Report:
        """Checks the options and the log before reading the lengths. Raises: as `run_study`."""
        from evenpack import console
        from evenpack.studies.imbalance.cluster import SCHEMES
        from evenpack.studies.imbalance.presentation import imbalance_tables, plot_imbalance, plot_step_speed_ups
        from evenpack.studies.imbalance.study import run_study

        study = run_study(self, find_subject)
        shown = [*map(console.text, study.subject.long_sentences()), *imbalance_tables(study)]
        for path, plot in ((self.plot, plot_imbalance), (self.plot_steps, plot_step_speed_ups)):
            if path is not None:
                plot(study, path)
                shown.append(console.text(f"Drew {path}"))
        value = {
            "origin": study.subject.origin,
            "long_sequences": study.subject.long_sequences(),
            "devices": sorted({row.devices for row in study.simulation.rows}),
            "needs": {scheme.label: scheme.needs for scheme in SCHEMES},
            "run": study.step,
            "reference": study.reference,
            "measured": study.measured,
            "log": study.forecast,
            "replay": study.replay,
            "simulation": study.simulation,
            "fitted_noise": study.fitted_noise,
            "notes": study.notes,
            "warnings": study.warnings,
        }
        return Report(value=value, shown=shown)
