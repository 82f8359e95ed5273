"""A shuffle study as tables."""

from collections.abc import Mapping, Sequence

from rich.console import RenderableType

from evenpack.studies.columns import Column, table_of
from evenpack.studies.shuffle.config import ShuffleSection
from evenpack.studies.shuffle.measure import ArmOrder
from evenpack.studies.statistics.paired import Spread

_READING = (
    Column("order", "arm"),
    Column(
        "read from disk",
        lambda row: f"{row.reading.bytes_from_disk / max(row.reading.bytes_used, 1):.2f} x used",
    ),
    Column("MB/s", "reading.bytes_per_second", ".1f", scale=1e-6),
)
_JUMPS = (
    Column("arm"),
    Column("seeds"),
    Column("jump, nats/target", "jump.mean", "+.4f"),
    Column("deviation", "jump.deviation", ".4f"),
)


def order_tables(orders: Sequence[ArmOrder], section: ShuffleSection) -> list[RenderableType]:
    """Returns tables of the randomness of each order, and of its reading rate; none before a run has finished."""
    if not orders:
        return []
    quality = (
        Column("order", "arm"),
        Column("displacement", "quality.displacement", ".3f"),
        Column("pack-mates", "quality.pack_mates", ".2f", scale=float(section.stretches)),
        Column("step-mates", "quality.step_mates", ".2f", scale=float(section.stretches)),
        Column("sources of a window", "quality.window_distance", ".2%"),
    )
    return [
        table_of(
            orders,
            quality,
            title=(
                "Order of an epoch: mean distance from the position in the corpus (1/3: uniform); neighbours of one "
                f"{section.stretches}th of the corpus in a pack or step, relative to chance; greatest distance of a "
                "window's sources"
            ),
        ),
        table_of(
            [order for order in orders if order.reading is not None],
            _READING,
            title=f"Reading the first {section.steps_read} steps, of a file that is not cached, in this process",
        ),
    ]


def jump_table(
    jumps: Mapping[str, Mapping[int, float]], section: ShuffleSection, *, borders: Sequence[int]
) -> list[RenderableType]:
    """Returns the jumps of the loss at borders of blocks, in each arm at the same steps.

    Nothing without a finished run.
    """
    rows = [
        {"arm": arm, "seeds": len(of_seed), "jump": Spread.of(list(of_seed.values()))}
        for arm, of_seed in jumps.items()
        if of_seed
    ]
    if not rows:
        return []
    title = (
        f"Mean loss of the {section.steps_around_border} steps after a border of blocks minus the mean of as many "
        f"before it, at steps {', '.join(map(str, borders))}"
    )
    return [table_of(rows, _JUMPS, title=title)]
