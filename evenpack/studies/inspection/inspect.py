"""What padding a list of lengths would cost, how it packs, and which recipe it needs, for `evenpack inspect`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import RenderableType
from rich.table import Table

from evenpack import console
from evenpack.console import Report, pairs, percent, text
from evenpack.data.packing import LengthHistogram, pack
from evenpack.errors import ConfigError, EvenpackError
from evenpack.shipped import names_run_file
from evenpack.studies.columns import Column, table_of
from evenpack.studies.lengths.reading import read_histogram
from evenpack.studies.lengths.statistics import (
    HistogramDistance,
    LengthRange,
    LengthStatistics,
    histogram_distance,
    length_ranges,
    length_statistics,
)
from evenpack.studies.lengths.subject import Subject
from evenpack.studies.packing.presentation import (
    DrawnLengths,
    Sweep,
    depth_curves_table,
    packing_table,
    plot_depth_curves,
    plot_packing,
    recommendation_text,
)
from evenpack.studies.packing.study import (
    CURVE_DEPTHS,
    OVERVIEW_DEPTHS,
    PackingRow,
    pack_lengths_to_try,
    parse_pack_lengths,
    recommend,
    study_packing,
    sweep_pack_lengths,
)
from evenpack.studies.plotting import require_plot
from evenpack.studies.provenance import COMPUTED, made_by, name_of_lengths

_NEGLIGIBLE_SHARE = 0.02
"""Fraction of slots that does not justify rows in which documents are cut anywhere."""


@dataclass(frozen=True, kw_only=True)
class RecipeCost:
    """The cost of one pass over all documents as rows of one length."""

    recipe: str
    rows: int
    padding_share: float
    """Fraction of slots that hold no token of a document or its end."""
    steps_over_concat: float
    """Rows, and so steps of equal batches, relative to `concat`."""


@dataclass(frozen=True, kw_only=True)
class RecipeAdvice:
    """The recommended recipes, by the scarce resource."""

    max_sequence_length: int
    mean_document_length: float
    """Mean tokens of a document, including end-of-text."""
    documents_cut: float
    """Fraction of documents that are longer than a row."""
    costs: tuple[RecipeCost, ...]
    scarce_data: str
    scarce_data_reason: str
    scarce_time: str
    scarce_time_reason: str


def advise_recipe(documents: LengthHistogram, *, max_sequence_length: int) -> RecipeAdvice:
    """Compares `documents`, `concat` and `padding` at rows of `max_sequence_length`, where an atom is a row.

    The advice is by what the recipes cost and cut. What they train is not part of it: the study `atom_size_mini`
    (docs/chunking.md) shows one difference between recipes on held-out documents, that padding ends lower than concat
    where documents are shorter than rows on average, and it takes 1.66 times the steps there.

    Args:
        documents: lengths in tokens of whole documents, including end-of-text.
    """
    costs = {cost.recipe: cost for cost in _costs(documents, max_sequence_length)}
    mean = documents.tokens / documents.sequences
    lengths = np.arange(1, documents.longest + 1)
    cut = float(documents.counts[: documents.longest][lengths > max_sequence_length].sum() / documents.sequences)
    padding, packed = costs["padding"], costs["documents"]
    position = "longer" if mean > max_sequence_length else "shorter"
    data = (
        "documents",
        f"documents are {position} than rows on average; this recipe cuts only those longer than a row and isolates "
        f"all, for {100 * packed.padding_share:.1f} % of padding; the recipe padding takes "
        f"{100 * (padding.steps_over_concat - 1):.0f} % more steps than concat. Which of them trains the better model "
        "is not shown (docs/chunking.md)",
    )
    extra = packed.steps_over_concat - 1
    if extra <= _NEGLIGIBLE_SHARE:
        time = ("documents", f"only {100 * extra:.1f} % more steps than concat, and documents stay isolated")
    else:
        time = ("concat", f"no padding; packs of whole pieces would take {100 * extra:.1f} % more steps")
    return RecipeAdvice(
        max_sequence_length=max_sequence_length,
        mean_document_length=mean,
        documents_cut=cut,
        costs=tuple(costs.values()),
        scarce_data=data[0],
        scarce_data_reason=data[1],
        scarce_time=time[0],
        scarce_time_reason=time[1],
    )


def _costs(documents: LengthHistogram, length: int) -> list[RecipeCost]:
    lengths = np.arange(1, documents.longest + 1)
    counts = documents.counts[: documents.longest]
    pieces = documents.fitted(length, "split").histogram
    packed = pack(pieces, "longest_pack_first", pack_length=length).packs
    concatenated = -(-documents.tokens // length)
    padded = int(counts @ -(-(lengths - 1) // (length - 1)))
    text = documents.tokens - documents.sequences
    held = {"documents": documents.tokens, "concat": documents.tokens, "padding": text + padded}
    rows = {"documents": packed, "concat": concatenated, "padding": padded}
    return [
        RecipeCost(
            recipe=name,
            rows=rows[name],
            padding_share=1 - held[name] / (rows[name] * length),
            steps_over_concat=rows[name] / concatenated,
        )
        for name in rows
    ]


_BAR_CELLS = 40


_READ = (
    Column("source"),
    Column("split"),
    Column("documents"),
    Column("sequences"),
    Column("tokens"),
    Column("cut", "tokens_cut"),
    Column("dropped", "tokens_dropped"),
)
_FILLED_UP = (Column("ends put", "subsequence_ends"), Column("tails padded", "tail_padding"))
_PACKED = (
    Column("packs"),
    Column("efficiency", lambda row: row["packing_efficiency"] if row["packs"] else None, ".2%"),
    Column("factor", lambda row: row["packing_factor"] if row["packs"] else None, ".3f"),
    Column("packed by", "packing_algorithm"),
)
_ROWS = (
    Column("source"),
    *(
        Column(heading.format(unit), f"{unit}_{key}", form)
        for unit in ("rows", "words")
        for heading, key, form in (
            ("{} read", "read", ""),
            ("{} dropped", "dropped", ""),
            ("% of {}", "dropped_share", ".2%"),
            ("{} kept", "kept", ""),
        )
    ),
)
_RECIPES = (
    Column("recipe"),
    Column("rows per epoch", "rows"),
    Column("steps, x concat", "steps_over_concat", ".3f"),
    Column("padding", "padding_share", ".2%"),
)


def splits_table(rows: Sequence[Mapping[str, Any]], *, title: str) -> Table:
    """Returns `Manifest.summary` as a table."""
    fills_up = any(row["subsequence_ends"] or row["tail_padding"] for row in rows)
    return table_of(rows, [*_READ, *(_FILLED_UP if fills_up else ()), *_PACKED], title=title)


def rows_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Returns `Manifest.row_summary` as a table."""
    return table_of(rows, _ROWS, title="Rows and words before tokenising")


def lengths_table(statistics: LengthStatistics, *, origin: str, pack_length: int) -> Table:
    """Returns lengths and the cost of padding as a table."""
    return pairs(
        {
            "sequences": statistics.sequences,
            "tokens": statistics.tokens,
            "length": f"shortest {statistics.shortest:,}, mean {statistics.mean:,.1f}, median {statistics.median:,}, "
            f"90 % up to {statistics.percentile_90:,}, 99 % up to {statistics.percentile_99:,}, "
            f"longest {statistics.longest:,}",
            f"padded to {pack_length:,}": f"{percent(statistics.padding_share)} of all slots would be padding; "
            f"packing can be up to {statistics.speed_up_limit:.2f} times as fast",
        },
        title=f"Lengths of {origin}",
    )


def histogram_table(ranges: Sequence[LengthRange], *, sequences: int) -> Table:
    """Returns a histogram with one bar for each range of lengths."""
    most = max(bar.sequences for bar in ranges)
    columns = (
        Column("tokens", lambda bar: f"{bar.shortest:,} to {bar.longest:,}"),
        Column("sequences"),
        Column("share", lambda bar: bar.sequences / sequences, ".2%"),
        Column("", lambda bar: "█" * round(_BAR_CELLS * bar.sequences / most)),
    )
    return table_of(ranges, columns)


def distance_table(found: HistogramDistance) -> Table:
    """Returns the distances of lengths to another histogram as a table."""
    return pairs(
        {
            "other": f"{found.sequences:,} sequences, mean {found.mean_length:,.1f}, longest {found.longest:,}",
            "total variation": f"{found.total_variation:.4f}: fraction of sequences that would have to change length",
            "largest CDF gap": f"{found.largest_cdf_gap:.4f}: between the fractions of sequences up to a length",
        },
        title=f"Lengths compared with those of {found.origin}",
    )


def advice_tables(advice: RecipeAdvice) -> list[RenderableType]:
    """Returns a table of the recipes' costs, and the recommendation."""
    title = (
        f"Recipes at max_sequence_length {advice.max_sequence_length:,}; documents have "
        f"{advice.mean_document_length:,.1f} tokens on average, {percent(advice.documents_cut)} are longer "
        "than a row"
    )
    lines = (
        f"Where data is scarce: data.recipe.kind={advice.scarce_data}: {advice.scarce_data_reason}\n"
        f"Where time is scarce: data.recipe.kind={advice.scarce_time}: {advice.scarce_time_reason}"
    )
    return [table_of(advice.costs, _RECIPES, title=title), text(lines)]


_SWEPT_BY = "longest_pack_first"
"""Algorithm of the comparison of pack lengths; every length and depth takes milliseconds."""


@dataclass(frozen=True, kw_only=True)
class Against(DrawnLengths):
    """Lengths that a subject is compared with."""

    distance: HistogramDistance
    """Distance of the subject's lengths, as they are packed, to these."""

    @property
    def footer(self) -> str:
        """The line below a figure that describes the other lengths."""
        distance = self.distance.total_variation
        return f"Against {self.name}: data {name_of_lengths(self.histogram)}; total variation {distance:.4f}"


def require_one_on_each_side(against: str, inputs: Sequence[str]) -> None:
    """Checks the inputs. Raises: ConfigError unless there is one on each side."""
    if len(inputs) > 1:
        raise ConfigError(f"--against compares one input with {against}, and {len(inputs)} were given: leave one")
    if names_run_file(against):
        raise ConfigError(
            f"--against takes a published name or a file of lengths, and {against} is a run: make it INPUT instead"
        )
    if against == "-" == inputs[0]:
        raise ConfigError("--against - and INPUT - would read standard input twice: write one of them to a file")


def read_against(subject: Subject, against: str) -> Against:
    """Reads the lengths called `against`: a published name, or an input that needs no option.

    Raises: as `read_histogram`, `--against` named.
    """
    try:
        other = read_histogram(against)
    except EvenpackError as error:
        raise type(error)(f"--against {against}: {error}") from error
    name = "standard input" if against == "-" else against
    return Against(name=name, histogram=other, distance=histogram_distance(subject.histogram, other, origin=name))


def inspect_lengths(
    subject: Subject, *, pack_lengths: str | None, plot: Path | None, against: Against | None = None
) -> Report:
    """Returns the figures, compared with the lengths `against` if there are any; draws them if requested.

    Raises: PackingError if a sequence is longer than a pack; ConfigError for a plot without matplotlib, invalid pack
    lengths, or either of them for rows that are packs already.
    """
    if subject.keeps_order:
        report = _inspect_rows(subject, is_drawn=plot is not None or pack_lengths is not None)
    else:
        report = _inspect_packs(subject, pack_lengths=pack_lengths, plot=plot, against=against)
    if against is not None:
        report.value["against"] = against.distance
        report.shown.append(distance_table(against.distance))
    return report


def _inspect_packs(subject: Subject, *, pack_lengths: str | None, plot: Path | None, against: Against | None) -> Report:
    """Reports on lengths, the packs that they fill at several pack lengths, and the cost of other recipes."""
    require_plot(plot)
    pack_length = subject.pack_length
    tried = pack_lengths_to_try(pack_length) if pack_lengths is None else parse_pack_lengths(pack_lengths)
    packings, sweep = _pack(subject, sorted({pack_length, *tried}))
    advice = _advice(subject)
    statistics = length_statistics(subject.histogram, pack_length=pack_length)
    shown = _shown(subject, statistics, packings, sweep, advice)
    if plot is not None:
        _draw(subject, packings, sweep, against, plot)
        shown.append(console.text(f"Drew {plot}"))
    value = {
        "origin": subject.origin,
        **_content(subject),
        "pack_length": pack_length,
        "long_sequences": subject.long_sequences(),
        "splits": subject.splits,
        "source_rows": subject.source_rows,
        "lengths": statistics,
        "histogram": subject.histogram.counts[: subject.histogram.longest].tolist(),
        "packings": packings,
        "pack_lengths": sweep.rows,
        "pack_lengths_auto": sweep.fullest,
        "recommendation": sweep.recommended,
        "recipes": advice,
    }
    return Report(value=value, shown=shown)


def _pack(subject: Subject, lengths: Sequence[int]) -> tuple[Sequence[PackingRow], Sweep]:
    """Packs at the subject's pack length by algorithm and depth, and at each of `lengths`, the subject's own too."""
    histogram = subject.histogram
    with console.messages().status("packing ...") as status:
        begin = status.update
        packings = study_packing(
            histogram, pack_length=subject.pack_length, depths=OVERVIEW_DEPTHS, baselines=False, begin=begin
        )
        fullest = sweep_pack_lengths(histogram, lengths, algorithm="auto", depths=(None,), begin=begin)
        recommended = recommend(
            packings,
            fullest,
            lambda chosen: sweep_pack_lengths(
                histogram, [chosen], algorithm="auto", depths=OVERVIEW_DEPTHS[1:], begin=begin
            ),
        )
        rows = sweep_pack_lengths(histogram, lengths, algorithm=_SWEPT_BY, depths=OVERVIEW_DEPTHS)
    return packings, Sweep(rows=rows, algorithm=_SWEPT_BY, fullest=fullest, recommended=recommended)


def _shown(
    subject: Subject,
    statistics: LengthStatistics,
    packings: Sequence[PackingRow],
    sweep: Sweep,
    advice: RecipeAdvice | None,
) -> list[RenderableType]:
    pack_length = subject.pack_length
    by_pack_length = {
        f"{length:,} slots": [row for row in sweep.rows if row.pack_length == length]
        for length in dict.fromkeys(row.pack_length for row in sweep.rows)
    }
    title = f"Pack lengths by limit of depth ({_SWEPT_BY}): efficiency, speed-up over padding"
    return [
        *([rows_table(subject.source_rows)] if subject.source_rows else []),
        *([splits_table(subject.splits, title="Sources")] if subject.splits else []),
        *map(console.text, subject.long_sentences()),
        lengths_table(statistics, origin=subject.origin, pack_length=pack_length),
        histogram_table(length_ranges(subject.histogram), sequences=statistics.sequences),
        packing_table(packings, pack_length=pack_length),
        depth_curves_table(by_pack_length, sweep.fullest, title=title),
        recommendation_text(sweep.recommended),
        *([] if advice is None else advice_tables(advice)),
        *map(console.text, subject.verification_sentences()),
    ]


def _content(subject: Subject) -> dict[str, Any]:
    """Returns for JSON that the content of a run's prepared files was not verified."""
    if subject.verified_by is None:
        return {}
    return {"content": "not verified", "verified_by": subject.verified_by}


def _draw(subject: Subject, packings: Sequence[PackingRow], sweep: Sweep, against: Against | None, plot: Path) -> None:
    plot_packing(
        DrawnLengths(name=subject.origin, histogram=subject.histogram),
        packings,
        plot,
        pack_length=subject.pack_length,
        footer=[
            subject.provenance_line(),
            *subject.long_sentences(),
            *subject.verification_sentences(),
            *([] if against is None else [against.footer]),
            f"Recommended by what auto fills without a limit: {sweep.recommended.reason}.",
        ],
        against=against,
        sweep=sweep,
    )


def _inspect_rows(subject: Subject, *, is_drawn: bool) -> Report:
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
    shown += [] if advice is None else advice_tables(advice)
    shown += map(console.text, subject.verification_sentences())
    if subject.source_rows:
        shown.insert(0, rows_table(subject.source_rows))
    value = {
        "origin": subject.origin,
        **_content(subject),
        "pack_length": subject.pack_length,
        "splits": subject.splits,
        "source_rows": subject.source_rows,
        "recipes": advice,
    }
    return Report(value=value, shown=shown)


def _advice(subject: Subject) -> RecipeAdvice | None:
    if subject.documents is None or subject.max_sequence_length is None:
        return None
    return advise_recipe(subject.documents, max_sequence_length=subject.max_sequence_length)


def inspect_side_by_side(subjects: Sequence[Subject], *, plot: Path | None) -> Report:
    """Returns the packing results of several lists of lengths, by depth, each at its own pack length.

    Raises: as `inspect_lengths`.
    """
    require_plot(plot)
    names = [subject.origin for subject in subjects]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ConfigError(f"'{twice[0]}' is given twice: compare inputs of different names")
    curves = {
        subject.origin: sweep_pack_lengths(
            subject.histogram, [subject.pack_length], algorithm=_SWEPT_BY, depths=CURVE_DEPTHS
        )
        for subject in subjects
    }
    title = f"Limits of depth ({_SWEPT_BY}): efficiency, speed-up over padding"
    shown: list[RenderableType] = [
        depth_curves_table(curves, title=title),
        *(console.text(f"{one.origin}: {line}") for one in subjects for line in one.verification_sentences()),
    ]
    if plot is not None:
        plot_depth_curves(curves, plot, footer=_footer_of_curves(subjects))
        shown.append(console.text(f"Drew {plot}"))
    contents = {subject.origin: _content(subject) for subject in subjects if subject.verified_by is not None}
    return Report(value={"curves": curves, **({"contents": contents} if contents else {})}, shown=shown)


def _footer_of_curves(subjects: Sequence[Subject]) -> list[str]:
    lines = [f"Packs by {_SWEPT_BY}; {made_by()}; {COMPUTED}"]
    for subject in subjects:
        lines += [
            f"{subject.origin}: data {subject.data}",
            *subject.long_sentences(),
            *subject.verification_sentences(),
        ]
    return lines
