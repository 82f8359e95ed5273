"""Which pack length and depth to take, from what the packers reached."""

from collections.abc import Sequence
from dataclasses import dataclass

from evenpack.studies.packing import PackingRow

_WORTH_LONGER_PACKS = 0.01
"""Share of slots that a longer pack must save: attention over it costs more memory, and its steps hold more."""
_AS_GOOD = 0.001
"""Share of slots that counts as no difference."""


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """A pack length, and the least depth that serves it."""

    pack_length: int
    efficiency: float
    """Share of slots that hold a token in packs of any depth."""
    sufficient_depth: int | None
    """The least limit of depth tried that fills packs within 0.1 points of that; None: only no limit does."""
    efficiency_at_depth: float
    reason: str


def recommend(rows: Sequence[PackingRow], sweep: Sequence[PackingRow]) -> Recommendation:
    """The pack length of `rows`, unless a longer one of `sweep` saves 1 point of slots or more.

    `rows` are several algorithms at one pack length, of which the best counts, `sweep` a quick one at several; both
    with and without a limit of depth. The shortest pack length within 0.1 points of the best is taken.
    """
    base = rows[0].pack_length
    fullness: dict[int, float] = {}
    for row in (*rows, *sweep):
        if row.depth_limit is None:
            fullness[row.pack_length] = max(row.efficiency, fullness.get(row.pack_length, 0.0))
    fullest = max(fullness.values())
    if fullest - fullness[base] < _WORTH_LONGER_PACKS:
        return _at(base, rows, f"longer packs, up to {max(fullness):,} slots, would be less than 1 point fuller")
    chosen = min(length for length, efficiency in fullness.items() if efficiency >= fullest - _AS_GOOD)
    gain = 100 * (fullness[chosen] - fullness[base])
    return _at(chosen, [row for row in sweep if row.pack_length == chosen], f"{gain:.1f} points fuller than {base:,}")


def _at(pack_length: int, rows: Sequence[PackingRow], reason: str) -> Recommendation:
    best: dict[int | None, float] = {}
    for row in rows:
        best[row.depth_limit] = max(row.efficiency, best.get(row.depth_limit, 0.0))
    limits = sorted(limit for limit in best if limit is not None)
    depth = next((limit for limit in limits if best[limit] >= best[None] - _AS_GOOD), None)
    return Recommendation(
        pack_length=pack_length,
        efficiency=best[None],
        sufficient_depth=depth,
        efficiency_at_depth=best[depth],
        reason=reason,
    )
