"""Cutting stock: column generation over strategies, with a certified lower bound on the packs.

A linear program over the known strategies computes how often to use each and the value of each length (its dual). A
knapsack over the duals finds strategies worth more than one pack, which are added to the program until there is none.
The duals, rounded to integers, prove how near the result is to the optimum.

Source: Gilmore and Gomory, "A linear programming approach to the cutting-stock problem" (1961); Farley, "A note on
bounding a class of linear programming problems, including cutting stock problems" (1990); dual inequalities: Valério
de Carvalho, "Using extra dual cuts to accelerate column generation" (2005).
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from random import Random

import numpy as np
from jaxtyping import Float64, Int64

from evenpack.data.packing.certificate import Certificate
from evenpack.data.packing.greedy import longest_pack_first, shortest_pack_first
from evenpack.data.packing.histogram import LengthHistogram
from evenpack.data.packing.pricing import BestPacks, best_packs, prove
from evenpack.data.packing.slots import place
from evenpack.data.packing.strategy import Certified, Strategy
from evenpack.errors import PackingError

_MOST_ROUNDS = 200
_LEAST_GAIN = 1e-9
_GAIN_GIVEN_UP = 0.9
"""Fraction of the gain of the best strategy for a length that may be given up for the sake of variety."""
_CLOSE = 1e-7
"""Relative distance between program and bound at which the iterations end."""
_ROUND_UP_FROM = (1.0, 0.9, 0.7, 0.5)
"""Fractions from which a use of a strategy is rounded up instead of down; the best result counts."""


def cutting_stock(histogram: LengthHistogram, pack_length: int, max_sequences_per_pack: int) -> Certified:
    """Returns the fewest packs that rounding the linear program gives; never more than longest_pack_first.

    Raises: PackingError if the solver fails.
    """
    best = dict(longest_pack_first(histogram, pack_length, max_sequences_per_pack))
    simple = Certificate.without_solving(histogram, pack_length, max_sequences_per_pack)
    if sum(best.values()) == simple.bound(histogram):
        return Certified(counts=best, certificate=simple)
    start = [*best, *shortest_pack_first(histogram, pack_length, max_sequences_per_pack)]
    program = _Program(histogram, pack_length, max_sequences_per_pack)
    program.add(start)
    program.solve()
    for candidate in (program.rounded(share) for share in _ROUND_UP_FROM):
        if sum(candidate.values()) < sum(best.values()):
            best = candidate
    proven = max(program.certificate, simple, key=lambda certificate: certificate.bound(histogram))
    return Certified(counts=best, certificate=proven)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Solution:
    """A solution of the linear program over the strategies known so far."""

    packs: float
    uses: Float64[np.ndarray, " strategies"]
    duals: Float64[np.ndarray, " pack_length"]
    """The value of a sequence in packs; index i is length i + 1."""


class _Program:
    """The linear program: the fewest packs whose slots hold every sequence.

    A slot may hold a shorter sequence. Free columns "a slot of one length serves as one of the next shorter" express
    this; with them the duals never decrease with length, which saves most of the iterations.
    """

    def __init__(self, histogram: LengthHistogram, pack_length: int, max_sequences_per_pack: int) -> None:
        from scipy import sparse  # takes 0.3 s, and only solving needs it

        self._histogram = histogram
        self._pack_length = pack_length
        self._max_sequences = max_sequences_per_pack
        self._present: Int64[np.ndarray, " rows"] = np.flatnonzero(histogram.counts)
        rows = len(self._present)
        self._row_of_slot = np.searchsorted(self._present, np.arange(pack_length + 1) - 1, side="right") - 1
        self._exchanges = sparse.diags_array([-1.0, 1.0], offsets=[0, 1], shape=(rows, rows), format="csc")[:, 1:]
        self._strategies: dict[Strategy, None] = {}
        self._random = Random(0)  # the same numbers in every version of Python
        self._solution: _Solution
        self.certificate: Certificate

    def add(self, strategies: Iterable[Strategy]) -> int:
        """Adds strategies. Returns: how many of them are new."""
        before = len(self._strategies)
        for strategy in strategies:
            rows = self._row_of_slot[list(strategy)]
            lengths = (int(self._present[row]) + 1 for row in rows if row >= 0)
            self._strategies[tuple(lengths)] = None
        return len(self._strategies) - before

    def solve(self) -> None:
        """Adds strategies until no other can improve the program, and proves its bound."""
        proven = -1.0
        for rounds_left in reversed(range(_MOST_ROUNDS)):
            self._solution = self._solve_once()
            limits = (self._histogram, self._pack_length, self._max_sequences)
            best = best_packs(self._solution.duals, *limits)
            bound = self._solution.packs / max(best.value, 1.0)
            if bound > proven or best.value <= 1 + _LEAST_GAIN:
                proven, duals = bound, self._solution.duals
            if self._solution.packs <= proven * (1 + _CLOSE) or not rounds_left or not self.add(self._worthwhile(best)):
                break
        self.certificate = prove(duals, *limits)

    def rounded(self, round_up_from: float) -> dict[Strategy, int]:
        """Returns whole uses of the strategies; the remaining sequences are packed longest first."""
        whole = np.floor(self._solution.uses + 1e-9)
        whole += self._solution.uses - whole >= round_up_from
        uses = dict(zip(self._strategies, whole.astype(np.int64).tolist(), strict=True))
        exact, left_over = place({strategy: count for strategy, count in uses.items() if count}, self._histogram)
        result = Counter(exact)
        if left_over.any():
            rest = LengthHistogram(counts=left_over)
            result.update(longest_pack_first(rest, self._pack_length, self._max_sequences))
        return dict(result)

    def _worthwhile(self, best: BestPacks) -> Iterable[Strategy]:
        """Returns, for each length, a strategy that holds it and is worth more than its pack, if there is one.

        It need not be the best one: the best ones of many lengths share the few shorter lengths whose prices are
        slightly too high, and would all compete for the same sequences.
        """
        gains = best.values_with() - 1
        for index in np.flatnonzero(gains > _LEAST_GAIN).tolist():
            yield best.near_best(index + 1, float(gains[index]) * _GAIN_GIVEN_UP, self._random)

    def _solve_once(self) -> _Solution:
        from scipy import sparse
        from scipy.optimize import linprog

        depths = [len(strategy) for strategy in self._strategies]
        slots = np.fromiter((length for strategy in self._strategies for length in strategy), dtype=np.int64)
        columns = np.repeat(np.arange(len(depths)), depths)
        shape = (len(self._present), len(depths))
        packs = sparse.csc_array((np.ones(len(slots)), (self._row_of_slot[slots], columns)), shape=shape)
        matrix = sparse.hstack([packs, self._exchanges], format="csc")
        cost = np.concatenate([np.ones(shape[1]), np.zeros(shape[0] - 1)])
        demand = self._histogram.counts[self._present].astype(np.float64)
        found = linprog(cost, A_ub=-matrix, b_ub=-demand, method="highs-ipm")
        if found.x is None:
            raise PackingError(f"the solver of the linear program gave up: {found.message}; take longest_pack_first")
        duals = np.zeros(self._pack_length)
        duals[self._present] = np.maximum(-found.ineqlin.marginals, 0)
        return _Solution(packs=float(found.fun), uses=found.x[: shape[1]], duals=duals)
