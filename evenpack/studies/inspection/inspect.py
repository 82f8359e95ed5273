"""The computation of `evenpack inspect`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from evenpack import console
from evenpack.errors import ConfigError
from evenpack.studies.inspection.recipes import RecipeAdvice, advice_shown, advise_recipe
from evenpack.studies.inspection.tables import histogram_table, lengths_table, rows_table, splits_table
from evenpack.studies.lengths.statistics import length_ranges, length_statistics
from evenpack.studies.lengths.subject import Subject, long_lines
from evenpack.studies.packing.options import parse_pack_lengths
from evenpack.studies.packing.packing import (
    CURVE_DEPTHS,
    OVERVIEW_DEPTHS,
    describe_work,
    pack_lengths_to_try,
    study_packing,
    sweep_pack_lengths,
)
from evenpack.studies.packing.plots import plot_depth_curves, plot_packing
from evenpack.studies.packing.recommendation import recommend
from evenpack.studies.packing.tables import depth_curves_table, packing_table, recommendation_text
from evenpack.studies.plotting import require_plot


def inspect_lengths(
    subject: Subject, *, pack_lengths: str | None, plot: Path | None
) -> tuple[dict[str, Any], list[RenderableType]]:
    """Returns the figures as a value for JSON and as rich tables; draws them if requested.

    Raises: PackingError if a sequence is longer than a pack; ConfigError for a plot without matplotlib, invalid pack
    lengths, or either of them for rows that are packs already.
    """
    if subject.keeps_order:
        return _inspect_rows(subject, is_drawn=plot is not None or pack_lengths is not None)
    if plot is not None:
        require_plot(plot)
    histogram, pack_length = subject.histogram, subject.pack_length
    tried = pack_lengths_to_try(pack_length) if pack_lengths is None else parse_pack_lengths(pack_lengths)
    lengths = sorted({pack_length, *tried})
    statistics = length_statistics(histogram, pack_length=pack_length)
    with console.messages().status("packing ...") as status:

        def begin(algorithm: str, depth: int | None) -> None:
            status.update(describe_work(algorithm, depth))

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
        lengths_table(statistics, origin=subject.origin, pack_length=pack_length),
        histogram_table(length_ranges(histogram), sequences=statistics.sequences),
        packing_table(packings, pack_length=pack_length),
        depth_curves_table(
            by_pack_length,
            fullest,
            title="Pack lengths by limit of depth (longest_pack_first): efficiency, speed-up over padding",
        ),
        recommendation_text(found),
    ]
    advice = _advice(subject)
    if advice is not None:
        shown += advice_shown(advice)
    if subject.splits:
        shown.insert(0, splits_table(subject.splits, title="Sources"))
    if subject.source_rows:
        shown.insert(0, rows_table(subject.source_rows))
    if plot is not None:
        plot_packing(histogram, statistics, packings, plot, pack_length=pack_length, sweep=sweep)
        shown.append(console.text(f"Drew {plot}"))
    value = {
        "origin": subject.origin,
        "pack_length": pack_length,
        "long_sequences": subject.long_sequences(),
        "splits": subject.splits,
        "source_rows": subject.source_rows,
        "lengths": statistics,
        "histogram": histogram.counts[: histogram.longest].tolist(),
        "packings": packings,
        "pack_lengths": sweep,
        "pack_lengths_auto": fullest,
        "recommendation": found,
        "recipes": advice,
    }
    return value, shown


def _inspect_rows(subject: Subject, *, is_drawn: bool) -> tuple[dict[str, Any], list[RenderableType]]:
    """Reports on rows that are packs already: their content, and the cost of other recipes.

    Raises: ConfigError if other packs, or a plot of packs, are requested.
    """
    if is_drawn:
        raise ConfigError(
            f"{subject.origin} has rows with atoms, which are packs already: --pack-lengths and --plot are about "
            "packs; leave them out, or inspect a run with the recipe documents"
        )
    advice = _advice(subject)
    shown: list[RenderableType] = [
        splits_table(subject.splits, title="Sources"),
        console.text("Rows keep the order in which they were prepared, and are packs already"),
    ]
    shown += [] if advice is None else advice_shown(advice)
    if subject.source_rows:
        shown.insert(0, rows_table(subject.source_rows))
    value = {
        "origin": subject.origin,
        "pack_length": subject.pack_length,
        "splits": subject.splits,
        "source_rows": subject.source_rows,
        "recipes": advice,
    }
    return value, shown


def _advice(subject: Subject) -> RecipeAdvice | None:
    if subject.documents is None or subject.max_sequence_length is None:
        return None
    return advise_recipe(subject.documents, max_sequence_length=subject.max_sequence_length)


def inspect_side_by_side(
    subjects: Sequence[Subject], *, plot: Path | None
) -> tuple[dict[str, Any], list[RenderableType]]:
    """Returns the packing results of several lists of lengths, by depth, each at its own pack length.

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
    shown: list[RenderableType] = [depth_curves_table(curves, title=title)]
    if plot is not None:
        plot_depth_curves(curves, plot)
        shown.append(console.text(f"Drew {plot}"))
    return {"curves": curves}, shown
