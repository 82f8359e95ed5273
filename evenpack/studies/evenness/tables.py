"""`evenpack study evenness` as a table."""

from collections.abc import Sequence

from rich.table import Table

from evenpack.studies.columns import Column, table_of
from evenpack.studies.evenness.evenness import EvennessRow

_COLUMNS = (
    Column("model"),
    Column("devices", form=","),
    Column("packs are", "packs_are"),
    Column("packs", form=","),
    Column("attention", "attention_share", ".1%"),
    Column("deviation", form=".2%"),
    Column("most / mean", "most", ".3f"),
    Column("waiting", form=".2%"),
    Column("time", form=".3f"),
)


def evenness_table(rows: Sequence[EvennessRow], *, pack_length: int) -> Table:
    """Returns a line for each model, number of devices, and packing."""
    return table_of(rows, _COLUMNS, title=f"Packs of {pack_length:,} slots, one to each device as they come")
