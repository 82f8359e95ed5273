"""Non-negative least squares histogram packing: mixes all ways to fill a pack exactly so that they match the histogram.

The inexact result of the solver is corrected here: a sequence without a slot is packed by itself, and a slot without a
sequence becomes padding.

Source: "Efficient Sequence Packing without Cross-contamination" (PackedBERT), sections 3.1.2, F.4 and S.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float64, Int64

from evenpack.data.packing.greedy import longest_pack_first
from evenpack.data.packing.histogram import LengthHistogram
from evenpack.data.packing.strategy import Strategy
from evenpack.errors import PackingError

_MOST_STRATEGIES = 60_000
"""Most strategies that the solver can handle; its time grows at least with their square. Three sequences fill 512
slots in 22,102 ways and take about a minute; four fill 384 slots in 400,000 ways."""

_SHORTAGE_WEIGHT = 1e6
"""Weight of a missing slot in `least_squares_padding`; the paper's value."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StrategyMixture:
    """The result of least squares: how often to use each strategy, in fractions, and the remaining differences."""

    strategies: Sequence[Strategy]
    """All strategies considered: the columns of the packing matrix."""
    repeats: Float64[np.ndarray, " strategies"]
    wanted: Int64[np.ndarray, " pack_length"]
    """Sequences of each length from 1 on."""

    @cached_property
    def packs(self) -> Counter[Strategy]:
        """The strategies that remain after rounding the repeats to whole packs."""
        whole = np.rint(self.repeats).astype(np.int64)
        return Counter({self.strategies[column]: int(whole[column]) for column in np.flatnonzero(whole).tolist()})

    @cached_property
    def residual(self) -> Int64[np.ndarray, " pack_length"]:
        """Sequences minus slots of each length after rounding: above 0 without a slot, below 0 slots to pad (F.4.4)."""
        residual = self.wanted.copy()
        for strategy, count in self.packs.items():
            for length in strategy:
                residual[length - 1] -= count
        return residual


def least_squares(
    histogram: LengthHistogram,
    pack_length: int,
    max_sequences_per_pack: int,
    *,
    weight: float = 0.09,
    weight_up_to: int = 8,
    leftovers: str = "paper",
) -> Mapping[Strategy, int]:
    """Minimises the squared differences between slots and sequences of each length (NNLSHP, equation 22).

    The difference at a length up to `weight_up_to` has the weight `weight` (0 or more), at any other 1: padding in
    place of a short sequence costs little. `leftovers` decides how sequences without a slot are packed: "paper", each
    in a pack of its own (with padding of the length that would complete it); "best_fit", together by
    `longest_pack_first`.

    Raises: PackingError for a wrong option, a sequence longer than a pack, or too many strategies to solve for.
    """
    _refuse_unknown(leftovers)
    mixture = mix_strategies(histogram, pack_length, max_sequences_per_pack, weight=weight, weight_up_to=weight_up_to)
    return exact_packs(mixture, max_sequences_per_pack, leftovers)


def mix_strategies(
    histogram: LengthHistogram, pack_length: int, max_sequences_per_pack: int, *, weight: float, weight_up_to: int
) -> StrategyMixture:
    """Returns the mixture from which `least_squares` makes its packs; see there for the arguments."""
    if not 0 <= weight < np.inf:
        raise PackingError(f"the weight of short lengths must be 0 or more, found {weight}")
    strategies = all_strategies(pack_length, max_sequences_per_pack)
    wanted = _wanted(histogram, pack_length)
    weights = np.where(np.arange(1, pack_length + 1) <= weight_up_to, weight, 1.0)
    repeats = _solve(weights[:, None] * packing_matrix(strategies, pack_length), weights * wanted)
    return StrategyMixture(strategies=strategies, repeats=repeats, wanted=wanted)


def least_squares_padding(
    histogram: LengthHistogram,
    pack_length: int,
    max_sequences_per_pack: int,
    *,
    leftovers: str = "paper",
) -> Mapping[Strategy, int]:
    """Minimises the squared padding by length, with a large weight on missing slots (equations 23 and 24).

    One more unknown for each length, its surplus of slots, is tied to slots minus sequences. As no unknown is negative,
    neither is the surplus, up to rounding. It takes two to six times as long as `least_squares` and has the same
    `leftovers`.

    Raises: PackingError for a wrong option, a sequence longer than a pack, or too many strategies to solve for.
    """
    _refuse_unknown(leftovers)
    strategies = all_strategies(pack_length, max_sequences_per_pack)
    wanted = _wanted(histogram, pack_length)
    slots = packing_matrix(strategies, pack_length)
    lengths = np.arange(1.0, pack_length + 1)
    no_surplus = np.zeros((pack_length, pack_length))
    surplus = -_SHORTAGE_WEIGHT * np.eye(pack_length)
    matrix = np.block([[lengths[:, None] * slots, no_surplus], [_SHORTAGE_WEIGHT * slots, surplus]])
    solution = _solve(matrix, np.concatenate([lengths * wanted, _SHORTAGE_WEIGHT * wanted]))
    mixture = StrategyMixture(strategies=strategies, repeats=solution[: len(strategies)], wanted=wanted)
    return exact_packs(mixture, max_sequences_per_pack, leftovers)


def _refuse_unknown(leftovers: str) -> None:
    if leftovers not in ("paper", "best_fit"):
        raise PackingError(f"leftovers must be 'paper' or 'best_fit', found '{leftovers}'")


def all_strategies(pack_length: int, max_sequences: int) -> list[Strategy]:
    """Returns every way to fill `pack_length` slots exactly with at most `max_sequences` lengths."""
    _refuse_too_many(pack_length, max_sequences)
    return list(_partitions(pack_length, max_sequences, 1))


def _refuse_too_many(pack_length: int, max_sequences: int) -> None:
    """Checks the number of strategies: by conjugation, the partitions into parts of `max_sequences` at most."""
    ways = [1] + [0] * pack_length
    for depth in range(1, min(max_sequences, pack_length) + 1):
        for slots in range(depth, pack_length + 1):
            ways[slots] += ways[slots - depth]
        if ways[pack_length] > _MOST_STRATEGIES:
            raise PackingError(
                f"{depth} sequences per pack fill {pack_length} slots in {ways[pack_length]} ways, and least squares "
                f"can handle {_MOST_STRATEGIES} at most; set max_sequences_per_pack to {depth - 1} or less, or pack "
                f"with longest_pack_first, which needs no limit"
            )


def _partitions(total: int, most: int, shortest: int) -> Iterator[Strategy]:
    """Yields descending tuples of 1 to `most` lengths, none below `shortest`, that sum to `total`.

    They come in the paper's order, by the shortest lengths, because the solver breaks ties by order.
    """
    if most > 1:
        for last in range(shortest, total // 2 + 1):
            for longer in _partitions(total - last, most - 1, last):
                yield (*longer, last)
    yield (total,)


def _wanted(histogram: LengthHistogram, pack_length: int) -> Int64[np.ndarray, " pack_length"]:
    """Returns the sequences of each length from 1 to `pack_length`."""
    if histogram.longest > pack_length:
        raise PackingError(
            f"a sequence of {histogram.longest} tokens does not fit into a pack of {pack_length} slots; raise "
            f"pack_length or cut the sequences"
        )
    return np.pad(histogram.counts[:pack_length], (0, max(0, pack_length - len(histogram.counts))))


def packing_matrix(strategies: Sequence[Strategy], pack_length: int) -> Float64[np.ndarray, "pack_length strategies"]:
    """Returns how many slots of each length (row) a pack of each strategy (column) has (F.4.2)."""
    slots = np.zeros((pack_length, len(strategies)))
    for column, strategy in enumerate(strategies):
        for length in strategy:
            slots[length - 1, column] += 1
    return slots


def _solve(
    matrix: Float64[np.ndarray, "equations unknowns"], target: Float64[np.ndarray, " equations"]
) -> Float64[np.ndarray, " unknowns"]:
    from scipy.optimize import nnls

    try:
        solution: Float64[np.ndarray, " unknowns"] = nnls(matrix, target)[0]
    except RuntimeError as error:
        raise PackingError(
            f"the least squares solver found no mixture of {matrix.shape[1]} strategies ({error}); "
            f"pack with longest_pack_first instead"
        ) from error
    return solution


def exact_packs(mixture: StrategyMixture, max_sequences: int, leftovers: str) -> Mapping[Strategy, int]:
    """Returns whole packs of a mixture, corrected so that each sequence is placed once (F.4.4)."""
    packs, residual = mixture.packs.copy(), mixture.residual
    for index in np.flatnonzero(residual < 0).tolist():
        _drop_slots(packs, index + 1, -int(residual[index]))
    left = np.maximum(residual, 0)
    if leftovers == "best_fit" and left.any():
        packs.update(longest_pack_first(LengthHistogram(counts=left), len(left), max_sequences))
    else:
        packs.update({(index + 1,): int(left[index]) for index in np.flatnonzero(left).tolist()})
    return packs


def _drop_slots(packs: Counter[Strategy], length: int, surplus: int) -> None:
    """Turns `surplus` slots of a length into padding; a pack that becomes empty is removed."""
    for strategy in sorted(strategy for strategy in packs if length in strategy):
        shortened, count = strategy, packs[strategy]
        while surplus and length in shortened:
            cut = min(count, surplus)
            packs[shortened] -= cut
            if not packs[shortened]:
                del packs[shortened]
            at = shortened.index(length)
            shortened = shortened[:at] + shortened[at + 1 :]
            if shortened:
                packs[shortened] += cut
            surplus, count = surplus - cut, cut
