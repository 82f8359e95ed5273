"""Draws the packers that use a solver, whose calls are recorded while the real algorithm runs."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
from packing_example import (
    GAP,
    LEFT,
    PACK_LENGTH,
    ROW,
    SEQUENCES,
    counted,
    draw_pack,
    draw_sequence,
    each_pack,
    finding,
    packed,
    picture,
)
from scipy import optimize
from svg import FAINT, INK, rectangle, text

from evenpack.data.packing import Packing, Strategy

STEP = ROW + GAP
RIGHT, UNIT = 404, 9.2
PRESENT = sorted(SEQUENCES)


@dataclass(frozen=True, kw_only=True)
class _Round:
    """The linear program over the strategies known in one round, with its solution."""

    packs: float
    uses: dict[Strategy, float]
    prices: dict[int, float]
    """Returns the dual value of a sequence of a length, in packs."""

    def worth(self, strategy: Strategy) -> float:
        return sum(self.prices[length] for length in strategy)


@contextmanager
def _listening(solver: str) -> Iterator[list[tuple[tuple[Any, ...], dict[str, Any], Any]]]:
    """Collects (arguments, keywords, result) of each call of a solver of SciPy, which packers import to solve."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any], Any]] = []
    solve = getattr(optimize, solver)

    def listen(*arguments: Any, **keywords: Any) -> Any:
        answer = solve(*arguments, **keywords)
        calls.append((arguments, keywords, answer))
        return answer

    with mock.patch.object(optimize, solver, listen):
        yield calls


def draw_cutting_stock() -> str:
    with _listening("linprog") as calls:
        packing = packed("cutting_stock")
    rounds = [_round(*call) for call in calls]
    first, last = rounds[0], rounds[-1]
    found = [strategy for strategy in last.uses if strategy not in first.uses]
    parts = _round_head(LEFT, f"1.  Greedy packs mixed: {first.packs:.2f} packs", first)
    parts.append(text(LEFT, 174, "2.  Better packs, by a knapsack:", size=14, weight=700))
    for row, strategy in enumerate(found):
        y = 186 + row * STEP
        parts += draw_pack(LEFT, y, strategy, UNIT)
        parts.append(text(LEFT + PACK_LENGTH * UNIT + 8, y + 13, f"worth {first.worth(strategy):.2f}"))
    parts += _round_head(RIGHT, f"3.  Mixed with these: {last.packs:.2f} packs", last)
    used = sorted((strategy for strategy, use in last.uses.items() if use > 1e-9), reverse=True)
    for row, strategy in enumerate(used):
        y = 186 + row * STEP
        parts.append(text(RIGHT + 34, y + 13, f"{last.uses[strategy]:.2f} x", anchor="end"))
        parts += draw_pack(RIGHT + 42, y, strategy, UNIT)
        parts.append(text(RIGHT + 50 + PACK_LENGTH * UNIT, y + 13, f"worth {last.worth(strategy):.2f}"))
    parts.append(text(RIGHT, 174, "No pack is worth more than one now:", size=14, weight=700))
    top = 186 + max(len(found), len(used)) * STEP + 30
    parts += _rounded_packs(top, packing)
    remark = "A linear program uses packs in fractions and prices each length; the prices find better packs."
    height = top + 24 + -(-packing.packs // 3) * STEP + 56
    return picture(f"{finding(packing)}; fewer than {packing.lower_bound} are impossible", remark, height, parts)


def _round(arguments: tuple[Any, ...], keywords: dict[str, Any], answer: Any) -> _Round:
    """Separates columns: those with a cost are strategies; those without let a slot hold a shorter sequence."""
    matrix = np.rint(-keywords["A_ub"].toarray()).astype(int)
    strategies = [
        tuple(length for row in reversed(range(len(PRESENT))) for length in [PRESENT[row]] * matrix[row, column])
        for column in np.flatnonzero(arguments[0])
    ]
    return _Round(
        packs=float(answer.fun),
        uses=dict(zip(strategies, answer.x.tolist(), strict=False)),
        prices=dict(zip(PRESENT, np.abs(answer.ineqlin.marginals).tolist(), strict=True)),
    )


def _round_head(left: float, title: str, one: _Round) -> list[str]:
    parts = [text(left, 88, title, size=14, weight=700), text(left, 108, "Price of each length, in packs:")]
    x = left
    for length in SEQUENCES:
        width = max(length, 3) * 5.0 if length > 6 else 32
        parts += draw_sequence(x, 116, length, width / length)
        parts.append(text(x + width / 2, 148, f"{one.prices[length]:.2f}", anchor="middle"))
        x += width + 4
    return parts


def _rounded_packs(top: float, packing: Packing) -> list[str]:
    """Draws all packs, and the lower bound on packs from the certificate's prices."""
    assert packing.certificate is not None
    price = {length: packing.certificate.prices[length - 1] / packing.certificate.pack_value for length in SEQUENCES}
    terms = " + ".join(f"{count} x {price[length]:.2f}" for length, count in SEQUENCES.items())
    worth = sum(count * price[length] for length, count in SEQUENCES.items())
    parts = [
        text(LEFT, top, "4.  Rounded to whole packs; what is left over is packed longest first", size=14, weight=700)
    ]
    parts += _in_columns(top + 12, each_pack(packing), set())
    bottom = top + 12 + -(-packing.packs // 3) * STEP + 18
    tokens_alone = -(-packing.tokens // PACK_LENGTH)
    proof = (
        f"As no pack is worth more than one, {worth:.2f} take {packing.lower_bound} packs at least; "
        f"the tokens alone would fill {tokens_alone}."
    )
    return [
        *parts,
        text(LEFT, bottom, f"All sequences are worth {terms} = {worth:.2f}."),
        text(LEFT, bottom + 20, proof),
    ]


def _in_columns(top: float, packs: Sequence[Strategy], outlined: set[int]) -> list[str]:
    parts: list[str] = []
    rows = -(-len(packs) // 3)
    for number, lengths in enumerate(packs):
        x, y = LEFT + number // rows * 246, top + number % rows * STEP
        parts += draw_pack(x, y, lengths, UNIT)
        if number in outlined:
            parts.append(rectangle(x, y, PACK_LENGTH * UNIT, ROW, "none", outline=INK))
    return parts


@dataclass(frozen=True, kw_only=True)
class _Mixture:
    """Draws the solver's solution, and the sequences left over by rounding."""

    uses: dict[Strategy, float]

    @property
    def whole(self) -> dict[Strategy, int]:
        return {strategy: round(use) for strategy, use in self.uses.items() if round(use)}

    @property
    def slots(self) -> Counter[int]:
        """Returns the number of slots of each length in all whole packs."""
        slots: Counter[int] = Counter()
        for strategy, count in self.whole.items():
            for length in strategy:
                slots[length] += count
        return slots


def draw_least_squares(algorithm: str, aim: str) -> str:
    with _listening("nnls") as calls:
        packing = packed(algorithm)
    (matrix, _), _, (answer, _) = calls[0]
    mixture = _mixture(matrix[:PACK_LENGTH], answer)
    order = sorted(mixture.uses.items(), key=lambda item: -item[1])
    shown = [item for item in order if round(item[1])]
    parts = [text(LEFT, 88, "1.  The mixture, rounded", size=14, weight=700)]
    for row, (strategy, use) in enumerate(shown):
        y = 100 + row * STEP
        parts.append(text(LEFT + 72, y + 13, f"{use:.2f} → {round(use)} x", anchor="end"))
        parts += draw_pack(LEFT + 80, y, strategy, UNIT)
    more = 100 + len(shown) * STEP + 14
    parts.append(text(LEFT, more, f"and {len(order) - len(shown)} more, each under one half: none"))
    parts += _residual(mixture)
    top = max(more, 118 + (len(SEQUENCES) + 1) * STEP) + 34
    parts += _mended(top, packing, mixture)
    remark = f"All ways to fill {PACK_LENGTH} slots exactly are mixed so that {aim}."
    return picture(finding(packing), remark, top + 24 + -(-packing.packs // 3) * STEP, parts)


def _mixture(matrix: np.ndarray, answer: np.ndarray) -> _Mixture:
    """Returns row weights: row i of `matrix` holds slots of length i + 1 times its weight, the smallest entry."""
    weights = np.array([row[row > 0].min() for row in matrix])
    slots = np.rint(matrix / weights[:, None]).astype(int)
    uses: dict[Strategy, float] = {}
    for column in np.flatnonzero(answer[: slots.shape[1]]):
        lengths = np.repeat(np.arange(1, PACK_LENGTH + 1), slots[:, column])
        if len(lengths):  # the columns of least_squares_padding's surplus have no slots
            uses[tuple(reversed(lengths.tolist()))] = float(answer[column])
    return _Mixture(uses=uses)


def _residual(mixture: _Mixture) -> list[str]:
    """Draws for each length the sequences, the slots, and their difference."""
    slots = mixture.slots
    parts = [text(RIGHT, 88, "2.  Sequences against slots", size=14, weight=700)]
    for row, (length, count) in enumerate(SEQUENCES.items()):
        y = 100 + row * STEP
        parts += draw_sequence(RIGHT, y, length, max(length * 5.0, 32) / length)
        more = count - slots[length]
        fate = "all placed" if not more else f"{more} left over" if more > 0 else f"{-more} to padding"
        parts.append(text(RIGHT + 106, y + 13, f"{count} in {counted(slots[length], 'slot')}"))
        parts.append(text(RIGHT + 196, y + 13, fate, weight=700 if more else 400))
    others = sum(number for length, number in slots.items() if length not in SEQUENCES)
    y = 100 + len(SEQUENCES) * STEP
    parts.append(rectangle(RIGHT, y, 96, ROW, FAINT))
    parts.append(text(RIGHT + 48, y + 13, "any other", size=12, weight=700, anchor="middle", colour="#ffffff"))
    parts.append(text(RIGHT + 106, y + 13, f"0 in {counted(others, 'slot')}"))
    return [*parts, text(RIGHT + 196, y + 13, f"{others} to padding", weight=700)]


def _mended(top: float, packing: Packing, mixture: _Mixture) -> list[str]:
    """Draws the packs of the mixture, then, outlined, a pack for each left-over sequence."""
    slots = mixture.slots
    alone = [(length,) for length, count in SEQUENCES.items() for _ in range(max(count - slots[length], 0))]
    mixed = list((Counter(each_pack(packing)) - Counter(alone)).elements())
    title = "3.  Unused slots become padding, each left-over sequence gets a pack (outlined)"
    packs = [*mixed, *alone]
    return [
        text(LEFT, top, title, size=14, weight=700),
        *_in_columns(top + 12, packs, set(range(len(mixed), len(packs)))),
    ]
