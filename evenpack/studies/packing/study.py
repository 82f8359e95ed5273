"""The comparison of packing algorithms on a list of lengths."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from evenpack import console
from evenpack.data.packing.baselines import sample_histogram
from evenpack.errors import PackingError
from evenpack.studies.lengths.subject import Subject, long_lines
from evenpack.studies.packing.packing import PackerChoice, describe_work, study_packing, study_sorted_batches
from evenpack.studies.packing.plots import DrawnLengths, plot_packing
from evenpack.studies.packing.tables import packing_table, sorted_batches_table
from evenpack.studies.plotting import require_plot


def study_subject(
    subject: Subject,
    *,
    depths: Sequence[int | None],
    choices: Sequence[PackerChoice] | None,
    sample: int | None,
    plot: Path | None,
) -> tuple[dict[str, Any], list[RenderableType]]:
    """Returns the comparison of packers as a value for JSON and as rich tables; draws it if requested.

    `sample` random sequences, always the same ones, represent all.

    The error of an algorithm is printed, and the others continue.

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
        begin=lambda algorithm, depth: console.messages().print(describe_work(algorithm, depth)),
        refused=lambda algorithm, depth, error: console.print_error(f"{algorithm}: {error}"),
    )
    if not rows:
        raise PackingError("none of the algorithms could pack these lengths; see above")
    batches = study_sorted_batches(histogram)
    shown: list[RenderableType] = [*long_lines(subject), packing_table(rows, pack_length=pack_length)]
    if batches:
        shown.append(sorted_batches_table(batches))
    if plot is not None:
        footer = [subject.origin_line(), *subject.long_sentences()]
        if sample is not None:
            footer.append(f"A random sample of {sample:,} of {subject.histogram.sequences:,} sequences.")
        drawn = DrawnLengths(name=subject.origin, histogram=histogram)
        plot_packing(drawn, rows, plot, pack_length=pack_length, footer=footer)
        shown.append(console.text(f"Drew {plot}"))
    value = {
        "origin": subject.origin,
        "pack_length": pack_length,
        "long_sequences": subject.long_sequences(),
        "packings": rows,
        "sorted_batches": batches,
    }
    return value, shown
