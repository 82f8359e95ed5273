"""What `evenpack inspect` looks at: a prepared run, or any list of lengths."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from evenpack.config import load_run_file, nearest
from evenpack.data.packing import FittedHistogram, LengthHistogram, Option
from evenpack.data.packing.baselines import sample_histogram
from evenpack.data.prepared import PreparedData
from evenpack.data.sequences import length_chunks
from evenpack.engine.config import RunConfig
from evenpack.errors import ConfigError, DataError, PackingError
from evenpack.launcher import console, views
from evenpack.launcher.cli.subject_options import SubjectOptions
from evenpack.models.common.section import TransformerConfig
from evenpack.studies.lengths import merge_histograms, read_histogram
from evenpack.studies.lengths.statistics import length_ranges, length_statistics
from evenpack.studies.packing.packing import (
    CURVE_DEPTHS,
    OVERVIEW_DEPTHS,
    STUDY_DEPTHS,
    PackerChoice,
    pack_lengths_to_try,
    study_packing,
    study_sorted_batches,
    sweep_pack_lengths,
)
from evenpack.studies.packing.recommendation import recommend
from evenpack.studies.plots import plot_depth_curves, plot_packing, require_plot


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Lengths, and where they come from."""

    origin: str
    pack_length: int
    fitted: FittedHistogram
    """To `pack_length`, as `--long` has it."""
    splits: tuple[dict[str, Any], ...]
    """`Manifest.summary` of a run; empty for a bare list of lengths."""
    model: TransformerConfig | None
    """The run's; None for a bare list of lengths."""

    @property
    def histogram(self) -> LengthHistogram:
        """No sequence in it is longer than `pack_length`."""
        return self.fitted.histogram

    def long_sequences(self) -> dict[str, Any]:
        """What was longer than a pack, for JSON."""
        fitted = self.fitted
        return {"policy": fitted.policy, "sequences": fitted.long_sequences, "tokens_lost": fitted.tokens_lost}


def find_subject(lengths: str, overrides: Sequence[str], options: SubjectOptions) -> Subject:
    """A `.yaml` file is a run, anything else a list of lengths.

    Raises: ConfigError for options that do not go together; DataError or PackingError for what cannot be read.
    """
    if options.pack_length is not None and options.pack_length < 1:
        raise ConfigError(f"--pack-length must be at least 1, not {options.pack_length}")
    if options.pack_length is None and options.long != "error":
        raise ConfigError(f"--long {options.long} needs a --pack-length: longer than what is to be too long?")
    if lengths.endswith((".yaml", ".yml")):
        if options.name is not None:
            raise ConfigError("--name chooses among the histograms of a .json file; a run's sources have --source")
        options.refuse_all_but(source=lengths, what="a run")
        return _of_run(Path(lengths), overrides, options)
    if overrides or options.source is not None:
        raise ConfigError(f"{lengths} is no run file (.yaml): overrides and --source say nothing about it")
    histogram = _read(lengths, options)
    origin = options.name or ("standard input" if lengths == "-" else lengths)
    return _fit(histogram, options, origin=origin, pack_length=histogram.longest, splits=(), model=None)


def inspect_lengths(
    subject: Subject, *, pack_lengths: str | None, plot: Path | None
) -> tuple[dict[str, Any], list[RenderableType]]:
    """The figures as a value for JSON and as what rich can print; draws them too if asked.

    Raises: PackingError if a sequence is longer than a pack; ConfigError for a plot without matplotlib, or pack lengths
    that are no numbers.
    """
    if plot is not None:
        require_plot(plot)
    histogram, pack_length = subject.histogram, subject.pack_length
    tried = pack_lengths_to_try(pack_length) if pack_lengths is None else _pack_lengths(pack_lengths)
    lengths = sorted({pack_length, *tried})
    statistics = length_statistics(histogram, pack_length=pack_length)
    with console.messages().status("packing ...") as status:

        def begin(algorithm: str, depth: int | None) -> None:
            status.update(_at_work(algorithm, depth))

        packings = study_packing(
            histogram, pack_length=pack_length, depths=OVERVIEW_DEPTHS, baselines=False, begin=begin
        )
        sweep = sweep_pack_lengths(histogram, lengths, algorithm="longest_pack_first", depths=OVERVIEW_DEPTHS)
        fullest = sweep_pack_lengths(histogram, lengths, algorithm="auto", depths=(None,), begin=begin)
        found = recommend(
            packings,
            fullest,
            lambda chosen: sweep_pack_lengths(
                histogram, [chosen], algorithm="auto", depths=OVERVIEW_DEPTHS[1:], begin=begin
            ),
        )
    by_pack_length = {f"{length:,} slots": [row for row in sweep if row.pack_length == length] for length in lengths}
    shown: list[RenderableType] = [
        *long_lines(subject),
        views.lengths_table(statistics, origin=subject.origin, pack_length=pack_length),
        views.histogram_table(length_ranges(histogram), sequences=statistics.sequences),
        views.packing_table(packings, pack_length=pack_length),
        views.depth_curves_table(
            by_pack_length,
            fullest,
            title="Pack lengths by limit of depth (longest_pack_first): efficiency, speed-up over padding",
        ),
        views.recommendation_text(found),
    ]
    if subject.splits:
        shown.insert(0, views.splits_table(subject.splits, title="Sources"))
    if plot is not None:
        plot_packing(histogram, statistics, packings, plot, pack_length=pack_length, sweep=sweep)
        shown.append(console.text(f"Drew {plot}"))
    value = {
        "origin": subject.origin,
        "pack_length": pack_length,
        "long_sequences": subject.long_sequences(),
        "splits": subject.splits,
        "lengths": statistics,
        "histogram": histogram.counts[: histogram.longest].tolist(),
        "packings": packings,
        "pack_lengths": sweep,
        "pack_lengths_auto": fullest,
        "recommendation": found,
    }
    return value, shown


def inspect_side_by_side(
    subjects: Sequence[Subject], *, plot: Path | None
) -> tuple[dict[str, Any], list[RenderableType]]:
    """What packing makes of several lists of lengths, by depth; each at its own pack length.

    Raises: as `inspect_lengths`.
    """
    if plot is not None:
        require_plot(plot)
    names = [subject.origin for subject in subjects]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ConfigError(f"'{twice[0]}' is given twice: compare inputs of different names")
    curves = {
        subject.origin: sweep_pack_lengths(
            subject.histogram, [subject.pack_length], algorithm="longest_pack_first", depths=CURVE_DEPTHS
        )
        for subject in subjects
    }
    title = "Limits of depth (longest_pack_first): efficiency, speed-up over padding"
    shown: list[RenderableType] = [views.depth_curves_table(curves, title=title)]
    if plot is not None:
        plot_depth_curves(curves, plot)
        shown.append(console.text(f"Drew {plot}"))
    return {"curves": curves}, shown


def study_subject(
    subject: Subject,
    *,
    depths: Sequence[int | None],
    choices: Sequence[PackerChoice] | None,
    sample: int | None,
    plot: Path | None,
) -> tuple[dict[str, Any], list[RenderableType]]:
    """The comparison of packers, as a value for JSON and as what rich can print; draws it too if asked.

    `sample` sequences, drawn at random but always the same ones, stand for all.

    What an algorithm cannot do is said, and the others go on.

    Raises: PackingError for a sample of more than all sequences, or if nothing could be packed; ConfigError for a plot
    that cannot be drawn.
    """
    if plot is not None:
        require_plot(plot)
    histogram, pack_length = subject.histogram, subject.pack_length
    if sample is not None:
        histogram = sample_histogram(histogram, sample, seed=0)
    rows = study_packing(
        histogram,
        pack_length=pack_length,
        depths=depths,
        choices=choices,
        begin=lambda algorithm, depth: console.messages().print(_at_work(algorithm, depth)),
        refused=lambda algorithm, depth, error: console.print_error(f"{algorithm}: {error}"),
    )
    if not rows:
        raise PackingError("none of the algorithms could pack these lengths; see above")
    batches = study_sorted_batches(histogram)
    shown: list[RenderableType] = [*long_lines(subject), views.packing_table(rows, pack_length=pack_length)]
    if batches:
        shown.append(views.sorted_batches_table(batches))
    if plot is not None:
        plot_packing(
            histogram, length_statistics(histogram, pack_length=pack_length), rows, plot, pack_length=pack_length
        )
        shown.append(console.text(f"Drew {plot}"))
    value = {
        "origin": subject.origin,
        "pack_length": pack_length,
        "long_sequences": subject.long_sequences(),
        "packings": rows,
        "sorted_batches": batches,
    }
    return value, shown


def parse_depths(given: str | None) -> tuple[int | None, ...]:
    """`2,3,none` as numbers; those of the study if None. Raises: ConfigError for other words."""
    if given is None:
        return STUDY_DEPTHS
    words = [word.strip() for word in given.split(",")]
    wrong = [word for word in words if word != "none" and not _is_positive(word)]
    if wrong:
        raise ConfigError(f"--depths {given}: '{wrong[0]}' is neither a number of 1 or more nor 'none'; give 2,3,none")
    return tuple(None if word == "none" else int(word) for word in words)


def _pack_lengths(given: str) -> tuple[int, ...]:
    """`512,640` as numbers."""
    words = [word.strip() for word in given.split(",")]
    wrong = [word for word in words if not _is_positive(word)]
    if wrong:
        raise ConfigError(f"--pack-lengths {given}: '{wrong[0]}' is no number of 1 or more; give 512,640")
    return tuple(int(word) for word in words)


def _is_positive(word: str) -> bool:
    return word.isdecimal() and int(word) > 0


def parse_choices(given: str | None) -> tuple[PackerChoice, ...] | None:
    """`cutting_stock,least_squares:weight=0:leftovers=best_fit` as choices.

    Raises: ConfigError for an option without a value; PackingError for unknown algorithms and options.
    """
    if given is None:
        return None
    choices = []
    for word in given.split(","):
        algorithm, *pairs = word.strip().split(":")
        wrong = [pair for pair in pairs if "=" not in pair]
        if wrong:
            raise ConfigError(f"--algorithms {given}: '{wrong[0]}' gives no value; write {algorithm}:option=value")
        options = {name: _value(value) for name, _, value in (pair.partition("=") for pair in pairs)}
        choices.append(PackerChoice(algorithm=algorithm, options=options))
    return tuple(choices)


def _value(word: str) -> Option:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(word)
    return word


def _at_work(algorithm: str, depth: int | None) -> str:
    return f"{algorithm}, {'no limit of depth' if depth is None else f'depth {depth}'} ..."


def _read(lengths: str, options: SubjectOptions) -> LengthHistogram:
    if options.tokenizer is None:
        return read_histogram(lengths, options)
    with console.PrepareProgress(console.messages()) as progress:
        return read_histogram(lengths, options, progress=progress)


def _fit(
    histogram: LengthHistogram,
    options: SubjectOptions,
    *,
    origin: str,
    pack_length: int,
    splits: tuple[dict[str, Any], ...],
    model: TransformerConfig | None,
) -> Subject:
    """`pack_length` unless the options have another."""
    pack_length = options.pack_length or pack_length
    try:
        fitted = histogram.fitted(pack_length, options.long)
    except PackingError as error:
        raise PackingError(f"{error} (--pack-length, --long)") from error
    return Subject(origin=origin, pack_length=pack_length, fitted=fitted, splits=splits, model=model)


def long_lines(subject: Subject) -> list[RenderableType]:
    fitted = subject.fitted
    if not fitted.long_sequences:
        return []
    done = {"truncate": "cut", "drop": "left out", "split": "split"}[fitted.policy]
    return [
        console.text(
            f"{fitted.long_sequences:,} sequences longer than {subject.pack_length:,} were {done}: "
            f"{fitted.tokens_lost:,} tokens lost"
        )
    ]


def _of_run(run_file: Path, overrides: Sequence[str], options: SubjectOptions) -> Subject:
    source = options.source
    config = load_run_file(run_file, RunConfig, overrides)
    prepared = PreparedData.open(config.prepared_dir, config.data)
    if source is not None and source not in prepared.source_names:
        raise ConfigError(f"--source {source}: {run_file} has no such source; {nearest(source, prepared.source_names)}")
    histograms = []
    for name in prepared.source_names if source is None else (source,):
        view = prepared.view(name, "train")
        if view.count:
            histograms.append(LengthHistogram.from_chunks(length_chunks(view), longest=view.max_sequence_length))
    if not histograms:
        raise DataError(f"{prepared.directory} holds no sequence to train on")
    return _fit(
        merge_histograms(histograms),
        options,
        origin=source or config.run.name,
        pack_length=prepared.pack_length,
        splits=tuple(prepared.manifest.summary()),
        model=config.model,
    )
