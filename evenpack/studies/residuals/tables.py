"""`evenpack study residuals` as tables."""

from collections.abc import Sequence

from rich.console import RenderableType

from evenpack.console import pairs, table
from evenpack.studies.residuals.search import MatrixSize, ResidualRow


def residual_tables(rows: Sequence[ResidualRow], size: MatrixSize, *, depth: int) -> list[RenderableType]:
    """Returns a table of the packing matrix, and one with a line for each setting."""
    facts = {
        "rows": f"{size.lengths:,} lengths",
        "columns": f"{size.strategies:,} ways to fill a pack with up to {depth} sequences",
        "non-zeros": f"{size.non_zeros:,} of {size.lengths * size.strategies:,}",
    }
    shown = [
        {
            "weight": f"{row.setting.weight:g}",
            "of lengths up to": "any" if row.setting.weight == 1 else f"{row.setting.weight_up_to:,}",
            "packs": row.packs,
            "efficiency": f"{100 * row.efficiency:.4f} %",
            "padding": row.padding,
            "left over": row.left_over,
            "missing": row.missing,
            "their tokens": row.missing_tokens,
            "used": row.used,
            "CPU s": f"{row.cpu_seconds:.1f}",
        }
        for row in rows
    ]
    title = "Least squares: sequences without a slot, slots without a sequence, strategies used"
    return [pairs(facts, title="Packing matrix"), table(shown, title=title)]
