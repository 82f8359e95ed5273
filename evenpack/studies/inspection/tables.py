"""`evenpack inspect` as tables."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from evenpack.console import pairs, percent, text
from evenpack.studies.columns import Column, table_of
from evenpack.studies.inspection.recipes import RecipeAdvice
from evenpack.studies.lengths.statistics import HistogramDistance, LengthRange, LengthStatistics

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
