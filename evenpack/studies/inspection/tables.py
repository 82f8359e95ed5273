"""`evenpack inspect` as tables."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from evenpack.console import pairs, percent, table
from evenpack.studies.lengths.distance import HistogramDistance
from evenpack.studies.lengths.statistics import LengthRange, LengthStatistics

_BAR_CELLS = 40


def splits_table(rows: Sequence[Mapping[str, Any]], *, title: str) -> Table:
    """Returns `Manifest.summary` as a table."""
    shown = []
    fills_up = any(row["subsequence_ends"] or row["tail_padding"] for row in rows)
    for row in rows:
        full = bool(row["packs"])
        added = {"ends put": row["subsequence_ends"], "tails padded": row["tail_padding"]} if fills_up else {}
        shown.append(
            {
                "source": row["source"],
                "split": row["split"],
                "documents": row["documents"],
                "sequences": row["sequences"],
                "tokens": row["tokens"],
                "cut": row["tokens_cut"],
                "dropped": row["tokens_dropped"],
                **added,
                "packs": row["packs"],
                "efficiency": percent(row["packing_efficiency"]) if full else None,
                "factor": f"{row['packing_factor']:.3f}" if full else None,
                "packed by": row["packing_algorithm"],
            }
        )
    return table(shown, title=title)


def rows_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Returns `Manifest.row_summary` as a table."""
    shown = [{"source": row["source"], **_read_and_kept(row, "rows"), **_read_and_kept(row, "words")} for row in rows]
    return table(shown, title="Rows and words before tokenising")


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
    rows = [
        {
            "tokens": f"{bar.shortest:,} to {bar.longest:,}",
            "sequences": bar.sequences,
            "share": percent(bar.sequences / sequences),
            "": "█" * round(_BAR_CELLS * bar.sequences / most),
        }
        for bar in ranges
    ]
    return table(rows)


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


def _read_and_kept(row: Mapping[str, Any], unit: str) -> dict[str, Any]:
    return {
        f"{unit} read": row[f"{unit}_read"],
        f"{unit} dropped": row[f"{unit}_dropped"],
        f"% of {unit}": percent(row[f"{unit}_dropped_share"]),
        f"{unit} kept": row[f"{unit}_kept"],
    }
