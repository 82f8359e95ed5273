"""What `evenpack inspect` looks at: a prepared run, or any list of lengths."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from evenpack.config import load_run_file, nearest
from evenpack.data.packing import LengthHistogram
from evenpack.data.prepared import PreparedData
from evenpack.engine.run_config import RunConfig
from evenpack.errors import ConfigError, DataError
from evenpack.launcher import console, views
from evenpack.studies.inspect import compare_packings, length_ranges, length_statistics
from evenpack.studies.lengths import merge_histograms, read_histogram
from evenpack.studies.packing import STUDY_DEPTHS, study_packing
from evenpack.studies.plots import plot_packing, require_matplotlib


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Lengths, and where they come from."""

    origin: str
    histogram: LengthHistogram
    pack_length: int
    splits: tuple[dict[str, Any], ...]
    """`Manifest.summary` of a run; empty for a bare list of lengths."""


def find_subject(
    lengths: str, overrides: Sequence[str], *, source: str | None, name: str | None, pack_length: int | None
) -> Subject:
    """A `.yaml` file is a run, anything else a list of lengths.

    Raises: ConfigError for options that do not go together; DataError or PackingError for what cannot be read.
    """
    if pack_length is not None and pack_length < 1:
        raise ConfigError(f"--pack-length must be at least 1, not {pack_length}")
    if lengths.endswith((".yaml", ".yml")):
        if name is not None:
            raise ConfigError("--name chooses among the histograms of a .json file; a run's sources have --source")
        return _of_run(Path(lengths), overrides, source, pack_length)
    if overrides or source is not None:
        raise ConfigError(f"{lengths} is no run file (.yaml): overrides and --source say nothing about it")
    histogram = read_histogram(lengths, name=name)
    origin = name or ("standard input" if lengths == "-" else lengths)
    return Subject(origin=origin, histogram=histogram, pack_length=pack_length or histogram.longest, splits=())


def inspect_lengths(subject: Subject, *, plot: Path | None) -> tuple[dict[str, Any], list[RenderableType]]:
    """The figures as a value for JSON and as what rich can print; draws them too if asked.

    Raises: PackingError if a sequence is longer than a pack; ConfigError for a plot without matplotlib.
    """
    if plot is not None:
        require_matplotlib()
    histogram, pack_length = subject.histogram, subject.pack_length
    statistics = length_statistics(histogram, pack_length=pack_length)
    packings = compare_packings(histogram, pack_length=pack_length)
    shown: list[RenderableType] = [
        views.lengths_table(statistics, origin=subject.origin, pack_length=pack_length),
        views.histogram_table(length_ranges(histogram), sequences=statistics.sequences),
        views.packing_table(packings, pack_length=pack_length),
    ]
    if subject.splits:
        shown.insert(0, views.splits_table(subject.splits, title="Sources"))
    if plot is not None:
        plot_packing(histogram, statistics, packings, plot, pack_length=pack_length)
        shown.append(console.text(f"Drew {plot}"))
    value = {
        "origin": subject.origin,
        "pack_length": pack_length,
        "splits": subject.splits,
        "lengths": statistics,
        "histogram": histogram.counts[: histogram.longest].tolist(),
        "packings": packings,
    }
    return value, shown


def study_subject(
    subject: Subject, *, depths: str | None, algorithms: str | None, plot: Path | None
) -> tuple[dict[str, Any], list[RenderableType]]:
    """The comparison of packers, as a value for JSON and as what rich can print; draws it too if asked.

    Raises: ConfigError for depths that are no numbers; PackingError for unknown algorithms; ConfigError for a plot
    without matplotlib.
    """
    if plot is not None:
        require_matplotlib()
    histogram, pack_length = subject.histogram, subject.pack_length
    rows = study_packing(
        histogram,
        pack_length=pack_length,
        depths=STUDY_DEPTHS if depths is None else _depths(depths),
        algorithms=None if algorithms is None else algorithms.split(","),
        begin=_announce,
    )
    shown: list[RenderableType] = [views.packing_table(rows, pack_length=pack_length)]
    if plot is not None:
        plot_packing(
            histogram, length_statistics(histogram, pack_length=pack_length), rows, plot, pack_length=pack_length
        )
        shown.append(console.text(f"Drew {plot}"))
    return {"origin": subject.origin, "pack_length": pack_length, "packings": rows}, shown


def _depths(given: str) -> tuple[int | None, ...]:
    """`2,3,none` as numbers."""
    words = [word.strip() for word in given.split(",")]
    wrong = [word for word in words if word != "none" and not (word.isdecimal() and int(word) > 0)]
    if wrong:
        raise ConfigError(f"--depths {given}: '{wrong[0]}' is neither a number of 1 or more nor 'none'; give 2,3,none")
    return tuple(None if word == "none" else int(word) for word in words)


def _announce(algorithm: str, depth: int | None) -> None:
    console.messages().print(f"{algorithm}, {'no limit of depth' if depth is None else f'depth {depth}'} ...")


def _of_run(run_file: Path, overrides: Sequence[str], source: str | None, pack_length: int | None) -> Subject:
    config = load_run_file(run_file, RunConfig, overrides)
    prepared = PreparedData.open(config.prepared_dir, config.data)
    if source is not None and source not in prepared.source_names:
        raise ConfigError(f"--source {source}: {run_file} has no such source; {nearest(source, prepared.source_names)}")
    histograms = []
    for name in prepared.source_names if source is None else (source,):
        view = prepared.view(name, "train")
        if view.count:
            histograms.append(LengthHistogram.from_lengths(view.lengths(), longest=view.max_sequence_length))
    if not histograms:
        raise DataError(f"{prepared.directory} holds no sequence to train on")
    return Subject(
        origin=source or config.run.name,
        histogram=merge_histograms(histograms),
        pack_length=pack_length or prepared.pack_length,
        splits=tuple(prepared.manifest.summary()),
    )
