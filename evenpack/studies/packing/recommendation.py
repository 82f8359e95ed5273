"""Recommends a pack length and a depth from the results of the packers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from evenpack.studies.packing.packing import PackingRow

_WORTH_LONGER_PACKS = 0.01
"""Fraction of slots that a longer pack must save: its attention costs more memory, and its steps hold more."""
_AS_GOOD = 0.001
"""Fraction of slots that counts as no difference."""


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """A recommended pack length, and the least sufficient depth."""

    pack_length: int
    efficiency: float
    """Fraction of slots that hold a token in packs of any depth."""
    sufficient_depth: int | None
    """The least tried limit of depth within 0.1 points of that; None: only packs without a limit."""
    efficiency_at_depth: float
    reason: str


def recommend(
    rows: Sequence[PackingRow], fullest: Sequence[PackingRow], at_depths: Callable[[int], Sequence[PackingRow]]
) -> Recommendation:
    """Returns the pack length of `rows`, unless a longer one of `fullest` saves 1 point of slots or more.

    Of several longer ones the next is taken only if it saves a point more.

    Args:
        rows: one pack length, with and without a limit of depth, the best algorithm for each among them.
        fullest: `auto` without a limit at several pack lengths, that one among them.
        at_depths: `auto` at another pack length, with and without a limit.
    """
    base = rows[0].pack_length
    fullness = {row.pack_length: row.efficiency for row in fullest}
    chosen = base
    for length in sorted(length for length in fullness if length > base):
        if fullness[length] >= fullness[chosen] + _WORTH_LONGER_PACKS:
            chosen = length
    if chosen == base:
        return _at(base, rows, f"longer packs, up to {max(fullness):,} slots, would be less than 1 point fuller")
    gain = 100 * (fullness[chosen] - fullness[base])
    return _at(chosen, at_depths(chosen), f"{gain:.1f} points fuller than {base:,}")


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
