"""Defines the small histogram that docs/packing.md packs with each algorithm, and draws its packs."""

from collections.abc import Sequence

import numpy as np
from svg import COLOURS, FAINT, INK, PADDING, document, rectangle, text

from evenpack.data.packing import LengthHistogram, Packing, Strategy, pack

PACK_LENGTH = 24
MAX_SEQUENCES = 3
SEQUENCES = {19: 5, 11: 3, 10: 2, 7: 6, 6: 6, 3: 1}
"""Lengths and counts, longest first: a small example on which every two kinds of packers differ."""

WIDTH, LEFT = 760, 24
ROW, GAP = 17, 4
COLOUR = dict(zip(SEQUENCES, COLOURS, strict=False))


def histogram(*, shortest: int = 1) -> LengthHistogram:
    """Returns the example, or only its sequences of `shortest` and more tokens."""
    counts = np.zeros(PACK_LENGTH, dtype=np.int64)
    for length, count in SEQUENCES.items():
        counts[length - 1] = count if length >= shortest else 0
    return LengthHistogram(counts=counts)


def packed(algorithm: str, *, shortest: int = 1) -> Packing:
    return pack(histogram(shortest=shortest), algorithm, pack_length=PACK_LENGTH, max_sequences_per_pack=MAX_SEQUENCES)


def each_pack(packing: Packing) -> list[Strategy]:
    return [
        strategy
        for strategy, count in zip(packing.strategies, packing.counts.tolist(), strict=True)
        for _ in range(count)
    ]


def draw_sequence(
    x: float, y: float, length: int, unit: float, *, outline: str | None = None, faded: bool = False
) -> list[str]:
    """Draws a sequence as a rectangle of `unit` pixels per token with its length as label."""
    colour = COLOUR.get(length, FAINT)
    return [
        rectangle(x, y, length * unit, ROW, colour, outline=outline, opacity=0.25 if faded else 1.0),
        text(
            x + length * unit / 2,
            y + 13,
            str(length),
            size=12 if length * unit > 12 else 9,
            weight=700,
            anchor="middle",
            colour=INK if faded else "#ffffff",
        ),
    ]


def draw_pack(
    x: float, y: float, lengths: Sequence[int], unit: float, *, fresh: int | None = None, slots: int = PACK_LENGTH
) -> list[str]:
    """Draws a row of `slots` slots; with `fresh`, all but that number of last sequences are faded."""
    parts = [rectangle(x, y, slots * unit, ROW, PADDING)]
    for index, length in enumerate(lengths):
        is_fresh = fresh is not None and index >= len(lengths) - fresh
        parts += draw_sequence(
            x, y, length, unit, outline=INK if is_fresh else None, faded=fresh is not None and not is_fresh
        )
        x += length * unit
    return parts


def picture(finding: str, remark: str, height: float, parts: Sequence[str]) -> str:
    """Adds a title with the finding and a line that explains the drawing."""
    head = [text(LEFT, 28, finding, size=18, weight=700), text(LEFT, 50, remark, size=14)]
    return document(WIDTH, height, [*head, *parts])


def finding(packing: Packing) -> str:
    return f"{packing.algorithm}: {packing.packs} packs, {percent(packing.efficiency)} full"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def counted(number: int, thing: str) -> str:
    return f"{number} {thing}" + ("" if number == 1 else "s")
