"""Packings as tables."""

from collections.abc import Mapping, Sequence

from rich.table import Table
from rich.text import Text

from evenpack.console import percent, table, text
from evenpack.studies.packing.packing import PackingRow, PaddingRow
from evenpack.studies.packing.recommendation import Recommendation


def packing_table(rows: Sequence[PackingRow], *, pack_length: int) -> Table:
    """Returns a table of algorithms at several depths."""
    shown = [
        {
            "algorithm": row.algorithm,
            "depth limit": _limit(row.depth_limit),
            "depth": row.depth,
            "strategies": row.strategies,
            "packs": row.packs,
            "bound": row.lower_bound,
            "efficiency": f"{100 * row.efficiency:.3f} %",
            "padding": row.padding,
            "factor": f"{row.packing_factor:.3f}",
            "above bound": f"{100 * row.gap:.4f} %",
            "CPU ms": f"{1000 * row.cpu_seconds:.1f}",
        }
        for row in rows
    ]
    return table(shown, title=f"Packs of {pack_length:,} slots")


def depth_curves_table(
    curves: Mapping[str, Sequence[PackingRow]], fullest: Sequence[PackingRow] = (), *, title: str
) -> Table:
    """Returns efficiency and speed-up over padding: a line for each curve, a column for each limit of depth.

    `fullest`, one row for each curve, is the result of `auto` without a limit.
    """
    shown = []
    for index, (name, rows) in enumerate(curves.items()):
        cells = {_limit(row.depth_limit): _full_and_fast(row) for row in rows}
        shown.append({"": name, **cells, **({"auto, none": _full_and_fast(fullest[index])} if fullest else {})})
    return table(shown, title=title)


def _full_and_fast(row: PackingRow) -> str:
    return f"{100 * row.efficiency:.1f} % {row.speed_up:.2f}x"


def sorted_batches_table(rows: Sequence[PaddingRow]) -> Table:
    """Returns the results of padding instead of packing."""
    shown = [
        {
            "batch size": f"{row.batch_size:,}",
            "slots": row.slots,
            "efficiency": percent(row.efficiency),
            "speed-up": f"{row.speed_up:.3f}",
        }
        for row in rows
    ]
    return table(shown, title="For comparison: sorted by length, cut into batches, each padded to its longest")


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


def _limit(depth: int | None) -> str:
    return "none" if depth is None else f"{depth}"
