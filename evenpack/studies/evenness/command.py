"""The command `evenpack study evenness`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evenpack.console import Report
from evenpack.studies.shared_options import Plot, parse_list, whole_number

if TYPE_CHECKING:
    from evenpack.studies.evenness.study import WeighedModel
    from evenpack.studies.lengths.subject import Subject


@dataclass(frozen=True, kw_only=True)
class EvennessCommand:
    """Compare the costs of packs with how equal they can be made.

    For whoever assigns packs to devices as they come, one to each: packs as evenpack fills them, packs that also spread
    long sequences by cost, and a bound for any packing into as many packs; beside them the full packs where a plan
    assigns several to each device by cost. Operations are counted on the models.

    \b
    Examples:
      evenpack study evenness wikipedia_2048 --plot evenness.png
      evenpack study evenness lengths.npy --pack-length 32768 --long split --models llama_160m --vocabulary-size 32000
      evenpack study evenness RUN.yaml --devices 8,64 --tolerance 0.02
    """

    models: Annotated[
        str | None,
        typer.Option(
            metavar="RUNS",
            help="Run files, or names of shipped ones, whose models are counted. Default: the run's own; "
            "bert_large_phase2,gpt2_xl where INPUT is not a run.",
            show_default=False,
        ),
    ] = None
    vocabulary_size: Annotated[
        int | None,
        typer.Option(min=2, help="Of the models. Default: that of each run file's tokenizer.", show_default=False),
    ] = None
    devices: Annotated[str, typer.Option(metavar="LIST", help="Numbers of devices, each with a pack.")] = "8,64,512"
    packs_per_device: Annotated[
        int, typer.Option(help="Packs that a device gets in a step where a plan assigns them by cost.")
    ] = 8
    tolerance: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="Share of the devices' time that may be spent waiting, as in 0.02: say whether any packing meets it, "
            "and what else would.",
            show_default=False,
        ),
    ] = None
    sample: Annotated[int, typer.Option(help="Pack so many random sequences where there are more.")] = 200_000
    plot: Plot = None

    def uses_device(self) -> bool:
        """Returns False: lengths are enough."""
        return False

    def run(self, find_subject: "Callable[[], Subject]") -> Report:
        """Checks the options before reading the lengths.

        Raises: ConfigError for an invalid option, a vocabulary that is not known, or a plot that cannot be drawn.
        """
        from evenpack import console
        from evenpack.data.packing.baselines import sample_histogram
        from evenpack.errors import ConfigError
        from evenpack.studies.evenness.presentation import evenness_table, plot_evenness, tolerance_table
        from evenpack.studies.evenness.study import cost_packs, evenness_rows, tolerance_rows
        from evenpack.studies.plotting import require_plot

        require_plot(self.plot)
        for option, count in (("--sample", self.sample), ("--packs-per-device", self.packs_per_device)):
            if count < 1:
                raise ConfigError(f"{option} must be at least 1, not {count}")
        if self.tolerance is not None and not 0 < self.tolerance < 1:
            raise ConfigError(f"--tolerance is a share of the devices' time above 0 and below 1, not {self.tolerance}")
        devices = parse_list(self.devices, "--devices", partial(whole_number, example="8,64,512"))
        models = None if self.models is None else self._models_of(self.models)
        subject = find_subject()
        if models is None:
            models = self._default_models(subject)
        histogram = subject.histogram
        if histogram.sequences > self.sample:
            histogram = sample_histogram(histogram, self.sample, seed=0)
        costs = [cost_packs(histogram, model, pack_length=subject.pack_length) for model in models]
        rows = [
            row
            for of_model in costs
            for row in evenness_rows(of_model, devices, packs_per_device=self.packs_per_device)
        ]
        packed = f"{histogram.sequences:,} of {subject.histogram.sequences:,} sequences"
        shown: list[Any] = [
            *map(console.text, subject.long_sentences()),
            evenness_table(rows, pack_length=subject.pack_length),
        ]
        tolerated = None
        if self.tolerance is not None:
            tolerated = [
                row for of_model in costs for row in tolerance_rows(of_model, devices, tolerance=self.tolerance)
            ]
            shown.append(tolerance_table(tolerated, tolerance=self.tolerance))
        if histogram is not subject.histogram:
            shown.append(console.text(f"Packed a random sample, {packed}; --sample N takes more."))
        if self.plot is not None:
            footer = [
                subject.provenance_line(),
                f"{packed}; a pack to each device as they come, planned: {self.packs_per_device} to each, by cost; "
                "operations counted, nothing timed.",
            ]
            plot_evenness(costs, rows, self.plot, footer=footer)
            shown.append(console.text(f"Drew {self.plot}"))
        value = {
            "origin": subject.origin,
            "pack_length": subject.pack_length,
            "sequences": histogram.sequences,
            "long_sequences": subject.long_sequences(),
            "sequences_alone": {of_model.model.name: of_model.alone for of_model in costs},
            "rows": rows,
            "tolerance": self.tolerance,
            "tolerance_rows": tolerated,
        }
        return Report(value=value, shown=shown)

    def _models_of(self, names: str) -> "list[WeighedModel]":
        return [*parse_list(names, "--models", partial(model_of_run_file, vocabulary_size=self.vocabulary_size))]

    def _default_models(self, subject: "Subject") -> "list[WeighedModel]":
        from evenpack.engine.resolving.cost_weights import head_share
        from evenpack.studies.evenness.study import WeighedModel

        config, prepared = subject.config, subject.prepared
        if config is None or prepared is None:
            return self._models_of("bert_large_phase2,gpt2_xl")
        name = f"{config.model.kind} {config.model.preset}"
        share = head_share(config, prepared)
        size = self.vocabulary_size or prepared.vocabulary_size
        return [WeighedModel.counted(name, config.model, vocabulary_size=size, head_share=share)]


def model_of_run_file(name: str, *, vocabulary_size: int | None) -> "WeighedModel":
    """Counts the operations of the model of a run file, which may be a shipped one.

    Args:
        vocabulary_size: None: that of the run file's tokenizer.

    Raises: ConfigError if there is no such file, or if the size is not known without loading the tokenizer.
    """
    from evenpack.config import load_run_file
    from evenpack.data.tokenizers.loading import vocabulary_size_of
    from evenpack.engine.config import RunConfig
    from evenpack.errors import ConfigError
    from evenpack.models.families import family_of
    from evenpack.studies.evenness.study import WeighedModel

    config = load_run_file(Path(name), RunConfig)
    if vocabulary_size is None:
        known = vocabulary_size_of(config.data.tokenizer)
        if known is None:
            raise ConfigError(
                f"--models {name}: the size of its vocabulary is known once its tokenizer "
                f"({config.data.tokenizer.kind}) is loaded: give --vocabulary-size"
            )
        vocabulary_size = known[0]
    masked = family_of(config.model).objective == "masked_tokens"
    share = config.masking.share if masked else 1.0
    return WeighedModel.counted(name, config.model, vocabulary_size=vocabulary_size, head_share=share)
