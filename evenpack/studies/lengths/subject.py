"""The input of the studies of lengths: a prepared run, or any list of lengths."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from evenpack import console
from evenpack.config import load_run_file, nearest
from evenpack.data.packing import FittedHistogram, LengthHistogram
from evenpack.data.prepared import PreparedData
from evenpack.engine.config import RunConfig
from evenpack.errors import ConfigError, DataError, PackingError
from evenpack.progress import FREQUENT_LINES_SECONDS, Progress
from evenpack.shipped import names_run_file
from evenpack.studies.lengths.options import SubjectOptions
from evenpack.studies.lengths.reading import GLUE, lengths_of, read_histogram
from evenpack.studies.provenance import COMPUTED, name_of_lengths, name_of_prepared, provenance_line

_GLUE_SLOTS = 128
"""The length at which GLUE's tasks are fine-tuned, with longer texts cut, unless --pack-length is given."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Lengths and their origin; the defaults are those of a plain list of lengths."""

    origin: str
    data: str
    """What a figure calls the data: sources of a run and their fingerprint, or the numbers of a plain list."""
    pack_length: int
    fitted: FittedHistogram
    """Lengths fitted to `pack_length` by `--long`."""
    config: RunConfig | None = None
    """The run; None for a plain list of lengths."""
    prepared: PreparedData | None = None
    """The run's data; None for a plain list of lengths."""
    keeps_order: bool = False
    """Whether its rows are packs already, whose tokens may include padding."""

    @property
    def histogram(self) -> LengthHistogram:
        """No sequence in it is longer than `pack_length`."""
        return self.fitted.histogram

    def provenance_line(self, *, device: str = COMPUTED) -> str:
        """Returns the line below a figure of these lengths."""
        return provenance_line(self.origin, data=self.data, device=device)

    def long_sentences(self) -> list[str]:
        """Reports the sequences that were longer than a pack, if there are any."""
        fitted = self.fitted
        if not fitted.long_sequences:
            return []
        done = {"truncate": "cut", "drop": "left out", "split": "split"}[fitted.policy]
        return [
            f"{fitted.long_sequences:,} sequences longer than {self.pack_length:,} were {done}: "
            f"{fitted.tokens_lost:,} tokens lost"
        ]

    def long_sequences(self) -> dict[str, Any]:
        """Returns the sequences that were longer than a pack, for JSON."""
        fitted = self.fitted
        return {"policy": fitted.policy, "sequences": fitted.long_sequences, "tokens_lost": fitted.tokens_lost}


def find_subject(lengths: str, overrides: Sequence[str], options: SubjectOptions) -> Subject:
    """Opens the input: a run file is a run, anything else a list of lengths.

    Raises: ConfigError for options that exclude each other; DataError or PackingError for an input that cannot be read.
    """
    if options.pack_length is not None and options.pack_length < 1:
        raise ConfigError(f"--pack-length must be at least 1, not {options.pack_length}")
    if options.pack_length is None and options.long != "error":
        raise ConfigError(f"--long {options.long} needs --pack-length, the length above which sequences are too long")
    if names_run_file(lengths):
        if options.name is not None:
            raise ConfigError("--name chooses among the histograms of a .json file; a run's sources have --source")
        options.refuse_all_but(source=lengths, what="a run")
        return _of_run(Path(lengths), overrides, options)
    if overrides or options.source is not None:
        raise ConfigError(f"{lengths} is not a run file (.yaml): overrides and --source do not apply to it")
    if lengths.startswith(GLUE) and options.pack_length is None:
        options = replace(options, pack_length=_GLUE_SLOTS, long="truncate")
    histogram = _read(lengths, options)
    origin = options.name or ("standard input" if lengths == "-" else lengths)
    return _fit(histogram, options, origin=origin, pack_length=histogram.longest)


def _of_run(run_file: Path, overrides: Sequence[str], options: SubjectOptions) -> Subject:
    source = options.source
    config = load_run_file(run_file, RunConfig, overrides)
    prepared = PreparedData.open(config.prepared_dir, config.data, verify="lengths")
    if source is not None and source not in prepared.source_names:
        raise ConfigError(f"--source {source}: {run_file} has no such source; {nearest(source, prepared.source_names)}")
    views = [prepared.view(name, "train") for name in (prepared.source_names if source is None else (source,))]
    if not any(view.count for view in views):
        raise DataError(f"{prepared.directory} holds no sequence to train on")
    origin = source or config.run.name
    subject = _fit(lengths_of(views), options, origin=origin, pack_length=prepared.pack_length)
    return replace(
        subject,
        data=name_of_prepared(prepared)
        if source is None
        else f"{name_of_prepared(prepared, source)} of {config.run.name}",
        config=config,
        prepared=prepared,
        keeps_order=config.data.keeps_order,
    )


def _fit(histogram: LengthHistogram, options: SubjectOptions, *, origin: str, pack_length: int) -> Subject:
    """Fits lengths to `pack_length` unless the options have another."""
    pack_length = options.pack_length or pack_length
    try:
        fitted = histogram.fitted(pack_length, options.long)
    except PackingError as error:
        raise PackingError(f"{error} (--pack-length, --long)") from error
    return Subject(origin=origin, data=name_of_lengths(histogram), pack_length=pack_length, fitted=fitted)


def _read(lengths: str, options: SubjectOptions) -> LengthHistogram:
    if options.tokenizer is None:
        return read_histogram(lengths, options)
    with Progress(console.messages(), interval_seconds=FREQUENT_LINES_SECONDS) as progress:
        return read_histogram(lengths, options, progress=progress)
