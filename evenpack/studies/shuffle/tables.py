"""A shuffle study as tables."""

from collections.abc import Mapping, Sequence

from rich.console import RenderableType

from evenpack import console
from evenpack.studies.shuffle.config import ShuffleSection
from evenpack.studies.shuffle.measure import ArmOrder
from evenpack.studies.statistics.paired import Spread


def order_tables(orders: Sequence[ArmOrder], section: ShuffleSection) -> list[RenderableType]:
    """Returns tables of the randomness of each order, and of its reading rate; none before a run has finished."""
    if not orders:
        return []
    chance = 1 / section.stretches
    quality = [
        {
            "order": one.arm,
            "displacement": f"{one.quality.displacement:.3f}",
            "pack-mates": _times(one.quality.pack_mates, chance),
            "step-mates": _times(one.quality.step_mates, chance),
            "sources of a window": console.percent(one.quality.window_distance),
        }
        for one in orders
    ]
    reading = [
        {
            "order": one.arm,
            "read from disk": f"{one.reading.bytes_from_disk / max(one.reading.bytes_used, 1):.2f} x used",
            "MB/s": f"{one.reading.bytes_per_second / 1e6:.1f}",
        }
        for one in orders
        if one.reading is not None
    ]
    return [
        console.table(
            quality,
            title=(
                "Order of an epoch: mean distance from the position in the corpus (1/3: uniform); neighbours of one "
                f"{section.stretches}th of the corpus in a pack or step, relative to chance; greatest distance of a "
                "window's sources"
            ),
        ),
        console.table(
            reading,
            title=f"Reading the first {section.steps_read} steps, of a file that is not cached, in this process",
        ),
    ]


def jump_table(
    jumps: Mapping[str, Mapping[int, float]], section: ShuffleSection, *, borders: Sequence[int]
) -> list[RenderableType]:
    """Returns the jumps of the loss at borders of blocks, in each arm at the same steps.

    Nothing without a finished run.
    """
    rows = []
    for arm, of_seed in jumps.items():
        if not of_seed:
            continue
        spread = Spread.of(list(of_seed.values()))
        deviation = None if spread.deviation is None else f"{spread.deviation:.4f}"
        rows.append(
            {"arm": arm, "seeds": len(of_seed), "jump, nats/target": f"{spread.mean:+.4f}", "deviation": deviation}
        )
    if not rows:
        return []
    title = (
        f"Mean loss of the {section.steps_around_border} steps after a border of blocks minus that of as many before "
        f"it, at steps {', '.join(map(str, borders))}"
    )
    return [console.table(rows, title=title)]


def _times(share: float | None, chance: float) -> str | None:
    return None if share is None else f"{share / chance:.2f}"
