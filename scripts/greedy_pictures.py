"""Draws the packers that place one sequence after another, and the alternatives to packing."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from packing_example import (
    GAP,
    LEFT,
    MAX_SEQUENCES,
    PACK_LENGTH,
    ROW,
    SEQUENCES,
    counted,
    draw_pack,
    draw_sequence,
    each_pack,
    finding,
    histogram,
    packed,
    percent,
    picture,
)
from svg import FAINT, INK, ghost, text

from evenpack.data.packing import Strategy
from evenpack.data.packing.baselines import next_fit_ends, sorted_batches

STEP = ROW + GAP
FRAMES_A_ROW, FRAME, FRAME_UNIT, FRAMES_TOP = 3, 242, 7.6, 74
BATCH_SIZE = 4


@dataclass(frozen=True, kw_only=True)
class _Grown:
    """A pack before and after the sequences of one length are placed."""

    before: Strategy
    after: Strategy

    @property
    def room(self) -> int:
        return PACK_LENGTH - sum(self.before)

    @property
    def closed(self) -> bool:
        return not self.room or len(self.before) == MAX_SEQUENCES


def draw_greedy(algorithm: str, rule: str) -> str:
    """Returns a frame for each length: the algorithm's own result for the example without shorter sequences."""
    parts: list[str] = []
    packs: list[Strategy] = []
    top, tallest = FRAMES_TOP, 0
    for number, length in enumerate(SEQUENCES):
        grown = _grow(packs, each_pack(packed(algorithm, shortest=length)), length)
        if number and not number % FRAMES_A_ROW:
            top, tallest = top + tallest, 0
        parts += _frame(LEFT + number % FRAMES_A_ROW * FRAME, top, number + 1, length, grown)
        packs = [one.after for one in grown]
        tallest = max(tallest, 46 + len(packs) * STEP)
    remark = f"Longest first, {rule}. Right: the room it had; closed: {MAX_SEQUENCES} sequences."
    return picture(finding(packed(algorithm)), remark, top + tallest, parts)


def _grow(packs: Sequence[Strategy], now: Sequence[Strategy], length: int) -> list[_Grown]:
    """Returns which pack became which when all sequences of `length` were added; of equal packs the first took most."""
    left = Counter(now)
    grown = []
    for before in packs:
        after = max(
            (one for one in left if left[one] and tuple(each for each in one if each > length) == before), key=len
        )
        left[after] -= 1
        grown.append(_Grown(before=before, after=after))
    return grown + [_Grown(before=(), after=after) for after in sorted(left.elements(), reverse=True)]


def _frame(left: float, top: float, number: int, length: int, grown: Sequence[_Grown]) -> list[str]:
    parts = [
        text(left, top + 12, f"{number}.  {counted(SEQUENCES[length], 'sequence')} of {length}", size=14, weight=700)
    ]
    for row, one in enumerate(grown):
        y = top + 22 + row * STEP
        fresh = len(one.after) - len(one.before)
        parts += draw_pack(left, y, one.after, FRAME_UNIT, fresh=fresh)
        label = "new" if not one.before else "closed" if one.closed else str(one.room)
        weight, colour = (700, INK) if fresh else (400, FAINT)
        parts.append(text(left + PACK_LENGTH * FRAME_UNIT + 5, y + 13, label, size=12, weight=weight, colour=colour))
    return parts


def arrivals() -> list[int]:
    """Returns all sequences of the example in a random order, the same each time."""
    lengths = np.repeat(list(SEQUENCES), list(SEQUENCES.values()))
    return [int(length) for length in np.random.default_rng(0).permutation(lengths)]


def draw_next_fit() -> str:
    unit, per_line = 5.9, 12
    order = arrivals()
    ((_, ends),) = next_fit_ends(np.array(order), PACK_LENGTH, MAX_SEQUENCES, separators=0)
    packs = [order[first:end] for first, end in pairwise([0, *ends.tolist()])]
    parts = [text(LEFT, 82, "They arrive in this order:", size=14, weight=700)]
    top = 92.0
    for line in (order[start : start + per_line] for start in range(0, len(order), per_line)):
        x = float(LEFT)
        for length in line:
            parts += draw_sequence(x, top, length, unit)
            x += length * unit
        top += STEP
    top += 30
    parts.append(text(LEFT, top - 6, "The open pack takes what comes, or is closed for good:", size=14, weight=700))
    for number, lengths in enumerate(packs):
        following = packs[number + 1][0] if number + 1 < len(packs) else None
        parts += _closed_pack(top + 4 + number * STEP, lengths, following)
    full = sum(order) / (len(packs) * PACK_LENGTH)
    title = f"next_fit: {len(packs)} packs, {percent(full)} full"
    remark = "One pack is open at a time. Dashed: the sequence that came next and found no room."
    return picture(title, remark, top + len(packs) * STEP + 20, parts)


def _closed_pack(y: float, lengths: Sequence[int], following: int | None) -> list[str]:
    unit = 11.0
    parts = draw_pack(LEFT, y, lengths, unit)
    room = PACK_LENGTH - sum(lengths)
    end = LEFT + sum(lengths) * unit
    why = "the last"
    if following is not None and following > room:
        parts.append(ghost(end, y + 1, following * unit, ROW - 2, INK))
        why = f"no room for {following}: {room} lost" if room else "full"
    elif following is not None:
        why = f"{len(lengths)} sequences: {room} lost"
    return [*parts, text(LEFT + 46 * unit, y + 13, why)]


def draw_none() -> str:
    unit, columns = 9.0, 3
    packs = each_pack(packed("none"))
    rows = -(-len(packs) // columns)
    parts = []
    for number, lengths in enumerate(packs):
        column, row = divmod(number, rows)
        parts += draw_pack(LEFT + column * (PACK_LENGTH * unit + 30), 70 + row * STEP, lengths, unit)
    remark = f"Each of the {len(packs)} sequences is padded to {PACK_LENGTH} slots."
    return picture(finding(packed("none")), remark, 70 + rows * STEP + 16, parts)


def draw_sorted_batches() -> str:
    unit, y = 16.0, 70.0
    result = sorted_batches(histogram(), BATCH_SIZE)
    shortest_first = [length for length in reversed(SEQUENCES) for _ in range(SEQUENCES[length])]
    parts, slots = [], []
    for number, start in enumerate(range(0, len(shortest_first), BATCH_SIZE), start=1):
        batch = shortest_first[start : start + BATCH_SIZE]
        slots.append(len(batch) * batch[-1])
        label = f"batch {number}: {len(batch)} x {batch[-1]} = {slots[-1]} slots, {slots[-1] - sum(batch)} of padding"
        parts.append(text(LEFT + batch[-1] * unit + 14, y + len(batch) * STEP / 2 + 2, label, size=14))
        for length in batch:
            parts += draw_pack(LEFT, y, (length,), unit, slots=batch[-1])
            y += STEP
        y += 10
    sizes = f"batches of {min(slots)} to {max(slots)} slots"
    title = f"sorted_batches of {BATCH_SIZE}: {percent(result.efficiency)} full, {sizes}"
    remark = f"{counted(result.sequences, 'sequence')}, sorted by length; each batch is padded to its longest."
    return picture(title, remark, y + 8, parts)
