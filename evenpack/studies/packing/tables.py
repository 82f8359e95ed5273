"""Packings as tables."""

from collections.abc import Mapping, Sequence

from rich.table import Table
from rich.text import Text

from evenpack.console import percent, table, text
from evenpack.studies.columns import Column, cells_across, table_of
from evenpack.studies.packing.packing import PackingRow, PaddingRow
from evenpack.studies.packing.recommendation import Recommendation

_DEPTH_LIMIT = Column("depth limit", "depth_limit", "d", missing="none")
_PACKINGS = (
    Column("algorithm"),
    _DEPTH_LIMIT,
    Column("depth"),
    Column("strategies"),
    Column("packs"),
    Column("bound", "lower_bound"),
    Column("efficiency", form=".3%"),
    Column("padding"),
    Column("factor", "packing_factor", ".3f"),
    Column("above bound", "gap", ".4%"),
    Column("CPU ms", "cpu_seconds", ".1f", scale=1e3),
)
_BATCHES = (
    Column("batch size", "batch_size", ","),
    Column("slots"),
    Column("efficiency", form=".2%"),
    Column("speed-up", "speed_up", ".3f"),
)
_FULL_AND_FAST = Column("", lambda row: f"{100 * row.efficiency:.1f} % {row.speed_up:.2f}x")


def packing_table(rows: Sequence[PackingRow], *, pack_length: int) -> Table:
    """Returns a table of algorithms at several depths."""
    return table_of(rows, _PACKINGS, title=f"Packs of {pack_length:,} slots")


def depth_curves_table(
    curves: Mapping[str, Sequence[PackingRow]], fullest: Sequence[PackingRow] = (), *, title: str
) -> Table:
    """Returns efficiency and speed-up over padding: a line for each curve, a column for each limit of depth.

    `fullest`, one row for each curve, is the result of `auto` without a limit.
    """
    lines = cells_across(curves, heading=_DEPTH_LIMIT, value=_FULL_AND_FAST)
    for line, row in zip(lines, fullest, strict=False):
        line["auto, none"] = _FULL_AND_FAST.text(row)
    return table(lines, title=title)


def sorted_batches_table(rows: Sequence[PaddingRow]) -> Table:
    """Returns the results of padding instead of packing."""
    return table_of(
        rows, _BATCHES, title="For comparison: sorted by length, cut into batches, each padded to its longest"
    )


def recommendation_text(found: Recommendation) -> Text:
    """Returns the settings to write into the run file."""
    lines = [
        f"Recommended: data.pack_length={found.pack_length} ({found.reason}), data.packing.algorithm=auto: "
        f"{percent(found.efficiency)} full"
    ]
    if found.sufficient_depth is not None:
        lines.append(
            f"If a model needs few sequences per pack: data.packing.max_sequences_per_pack={found.sufficient_depth} "
            f"still fills {percent(found.efficiency_at_depth)}"
        )
    return text("\n".join(lines))
