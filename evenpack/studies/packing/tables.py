"""`evenpack study packing` as tables."""

from collections.abc import Mapping, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from evenpack.console import pairs, percent, table, text
from evenpack.studies.columns import Column, cells_across, table_of
from evenpack.studies.packing.packing import PackingRow, PaddingRow, Recommendation
from evenpack.studies.packing.residuals import MatrixSize, ResidualRow

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
_SETTINGS = (
    Column("weight", "setting.weight", "g"),
    Column("of lengths up to", lambda row: "any" if row.setting.weight == 1 else f"{row.setting.weight_up_to:,}"),
    Column("packs"),
    Column("efficiency", form=".4%"),
    Column("padding"),
    Column("left over", "left_over"),
    Column("missing"),
    Column("their tokens", "missing_tokens"),
    Column("used"),
    Column("CPU s", "cpu_seconds", ".1f"),
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


def residual_tables(rows: Sequence[ResidualRow], size: MatrixSize, *, depth: int) -> list[RenderableType]:
    """Returns a table of the packing matrix, and one with a line for each setting."""
    facts = {
        "rows": f"{size.lengths:,} lengths",
        "columns": f"{size.strategies:,} ways to fill a pack with up to {depth} sequences",
        "non-zeros": f"{size.non_zeros:,} of {size.lengths * size.strategies:,}",
    }
    title = "Least squares: sequences without a slot, slots without a sequence, strategies used"
    return [pairs(facts, title="Packing matrix"), table_of(rows, _SETTINGS, title=title)]
