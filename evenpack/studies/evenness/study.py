"""How equal the costs of packs are, how equal any packing can make them, and what that is worth.

Every pack has the same slots, so packs differ in attention alone. Where packs are assigned to devices as they come, one
to each, a step takes as long as the most expensive of them.

    lengths -> full packs      `longest_pack_first`, as in training
            -> even packs      long sequences spread by cost, then short ones where they fill; the full ones where
                               that gains nothing
            -> least spread    a bound for every packing into as many packs

For comparison, full packs where a plan assigns those of a step by cost, some to each device, as evenpack does.

The bound: a pack costs at least what its most expensive sequence does. Give every sequence above the mean a pack of its
own with nothing else in it, and divide the rest equally over the other packs. These costs are majorised by the costs of
any packing (Marshall, Olkin and Arnold, "Inequalities", chapter 1), so every convex measure of spread is at least
theirs: the deviation, and the expected maximum of any number of packs.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float64, Int64

from evenpack.data.order.balance import assign_by_cost
from evenpack.data.order.step_plan import PackStatistics, item_costs
from evenpack.data.order.step_shape import CostWeights
from evenpack.data.packing import LengthHistogram, Packing, pack
from evenpack.engine.resolving.cost_weights import counted_weights
from evenpack.kernels.visible_pairs import visible_pairs
from evenpack.models.config import ModelConfig
from evenpack.models.cost import Work, step_flops
from evenpack.studies.statistics.laws import expected_maximum_of_draws

SPREAD_ABOVE = (1 / 8, 1 / 16, 1 / 32, 1 / 64)
"""Fractions of a pack above which even packs spread sequences by cost; the best one counts, or none."""

PLANNED_STEPS = 100
"""Steps that are drawn where packs are assigned by cost."""

_PACKS_PER_DEVICE = (2, 4, 8, 16, 32, 64)
"""Packs per device that are tried for a tolerance where one each does not meet it."""
_SHORTEST_CUT = 64
_TOKENS = 2000
"""Tokens that are enough for a fraction of them in the output head."""

_CANDIDATES = 256
"""Cheapest packs that are tried for a sequence before a new one is opened: packs without room are few until the end."""


@dataclass(frozen=True, kw_only=True)
class WeighedModel:
    """A model, and what its operations weigh."""

    name: str
    weights: CostWeights
    unit_flops: float
    """Floating-point operations of a unit of the weights, forward and backward."""

    @classmethod
    def counted(cls, name: str, model: ModelConfig, *, vocabulary_size: int, head_share: float) -> "WeighedModel":
        """Counts the operations of a model; `head_share`: rows of its output head per token."""
        weights = counted_weights(model, vocabulary_size=vocabulary_size, head_share=head_share)
        work = Work(
            slots=_TOKENS,
            squared_lengths=0,
            head_slots=round(_TOKENS * head_share),
            sequences=0,
            pairs_within=dict.fromkeys(model.windows, 0),
        )
        flops = step_flops(model, vocabulary_size=vocabulary_size, work=work)
        return cls(name=name, weights=weights, unit_flops=flops / (_TOKENS * weights.per_token))

    def attention_costs(self, lengths: Int64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
        """Returns the weight of attention in sequences of these lengths."""
        windows = self.weights.per_pair_within
        of_each = PackStatistics(
            tokens=lengths,
            squared_lengths=lengths**2,
            segments=np.ones_like(lengths),
            pairs_within={window: visible_pairs(lengths, window=window, causal=False) for window in windows},
        )
        return item_costs(self.weights.in_layout("packed"), of_each)


@dataclass(frozen=True, kw_only=True, eq=False)
class PackCosts:
    """The costs of all packs of some lengths for a model, in each packing; padding costs what tokens do."""

    histogram: LengthHistogram
    model: WeighedModel
    pack_length: int
    of_slots: float
    """The part of a pack's cost that is the same in all."""
    full: Float64[np.ndarray, " packs"]
    even: tuple[np.ndarray, ...]
    """For each fraction of `SPREAD_ABOVE`, those of the even packs, which may be more."""
    least: Float64[np.ndarray, " packs"]
    """The bound, at as many packs as the full ones."""
    alone: int
    """Sequences that cost more than an equal share of what is left: they set the bound."""

    def by_name(self, devices: int) -> dict[str, Float64[np.ndarray, " packs"]]:
        """Returns the costs by what the packs are; even ones are those that take the least time on these devices."""
        even = min((self.full, *self.even), key=lambda costs: len(costs) * expected_maximum_of_draws(costs, devices))
        return {"full": self.full, "even": even, "least": self.least}


def cost_packs(histogram: LengthHistogram, model: WeighedModel, *, pack_length: int) -> PackCosts:
    """Packs the sequences in both ways, and computes the bound.

    Raises: PackingError for a sequence longer than `pack_length`.
    """
    packing = pack(histogram, "longest_pack_first", pack_length=pack_length)
    lengths = np.repeat(np.arange(len(histogram.counts), 0, -1), histogram.counts[::-1])
    costs = model.attention_costs(lengths)
    least, alone = least_spread(costs, packing.packs)
    of_slots = model.weights.per_token * pack_length
    return PackCosts(
        histogram=histogram,
        model=model,
        pack_length=pack_length,
        of_slots=of_slots,
        full=of_slots + _attention_of(packing, model),
        even=tuple(
            of_slots + even_packs(lengths, costs, pack_length, packs=packing.packs, above=share)
            for share in SPREAD_ABOVE
        ),
        least=of_slots + least,
        alone=alone,
    )


def _attention_of(packing: Packing, model: WeighedModel) -> Float64[np.ndarray, " packs"]:
    of_strategy = np.repeat(np.arange(len(packing.strategies)), packing.depths)
    costs = np.bincount(of_strategy, weights=model.attention_costs(packing.slot_lengths))
    return np.repeat(costs, packing.counts)


def least_spread(costs: Float64[np.ndarray, " sequences"], packs: int) -> tuple[Float64[np.ndarray, " packs"], int]:
    """Returns the bound for any packing of sequences into so many packs, and the sequences that are alone in it.

    Args:
        costs: of the sequences, descending.
    """
    if packs >= len(costs):
        return np.pad(costs, (0, packs - len(costs))), len(costs)
    left = costs.sum() - np.append(0.0, np.cumsum(costs[: packs - 1]))
    levels = left / np.arange(packs, 0, -1)  # of the other packs, if the first 0, 1, ... sequences are alone
    fits = costs[:packs] <= levels
    alone = int(fits.argmax()) if fits.any() else packs - 1
    return np.append(costs[:alone], np.full(packs - alone, levels[alone])), alone


def even_packs(
    lengths: Int64[np.ndarray, " sequences"],
    costs: Float64[np.ndarray, " sequences"],
    pack_length: int,
    *,
    packs: int,
    above: float,
) -> Float64[np.ndarray, " packs"]:
    """Packs sequences so that the sums of costs are nearly equal. Returns: the sum of each pack.

    Longest first, a sequence of more than the fraction `above` of a pack goes into the cheapest pack that has room for
    it (longest processing time first, Graham 1969); the others go into the fullest pack with room, as in
    `longest_pack_first`. A new pack is opened where there is no room.

    Args:
        lengths: descending.
        packs: open packs at the start; the result may have more.
    """
    room, sums = [pack_length] * packs, [0.0] * packs
    cheapest = [(0.0, index) for index in range(packs)]  # a heap

    def open_pack() -> int:
        room.append(pack_length)
        sums.append(0.0)
        return len(sums) - 1

    long = int(np.searchsorted(-lengths, -above * pack_length))
    pairs = list(zip(lengths.tolist(), costs.tolist(), strict=True))
    for length, cost in pairs[:long]:
        without_room: list[tuple[float, int]] = []
        while cheapest and len(without_room) < _CANDIDATES and room[cheapest[0][1]] < length:
            without_room.append(heapq.heappop(cheapest))
        has_room = bool(cheapest) and room[cheapest[0][1]] >= length
        index = heapq.heappop(cheapest)[1] if has_room else open_pack()
        room[index] -= length
        sums[index] += cost
        for entry in (*without_room, (sums[index], index)):
            heapq.heappush(cheapest, entry)
    fullest = sorted((slots, index) for index, slots in enumerate(room))
    for length, cost in pairs[long:]:
        place = bisect_left(fullest, (length, -1))
        slots, index = fullest.pop(place) if place < len(fullest) else (pack_length, open_pack())
        sums[index] += cost
        insort(fullest, (slots - length, index))
    return np.array([total for total in sums if total], dtype=np.float64)


def planned_maximum(
    costs: Float64[np.ndarray, " packs"], devices: int, *, packs_per_device: int, by_cost: bool = True
) -> float:
    """Returns the expected cost of the most expensive device where the packs of a step are assigned by cost.

    Each of `PLANNED_STEPS` steps is drawn from all packs. Costs are taken relative to the mean of what was drawn.

    Args:
        by_cost: False: each device gets as many packs as they come.
    """
    generator = np.random.default_rng(0)
    ratios = []
    for _ in range(PLANNED_STEPS):
        drawn = generator.choice(costs, (devices, packs_per_device))
        if by_cost:
            drawn = drawn.ravel()
            drawn = drawn[assign_by_cost(drawn, ranks=devices, micro_batches=packs_per_device, per_micro_batch=False)]
        of_device = drawn.reshape(devices, -1).sum(axis=1)
        ratios.append(of_device.max() / of_device.mean())
    return float(np.mean(ratios) * costs.mean() * packs_per_device)


@dataclass(frozen=True, kw_only=True)
class EvennessRow:
    """What one packing costs a model on a number of devices, a pack to each as they come, or planned."""

    model: str
    devices: int
    packs_are: str
    """`full`, `even`, `least`, which is the bound, or `planned`: the full ones, several to a device by cost."""
    packs: int
    attention_share: float
    """Attention's fraction of all operations."""
    deviation: float
    """Standard deviation of the costs of packs over their mean."""
    most: float
    """The most expensive pack over the mean one."""
    waiting: float
    """Fraction of the devices' time for which they wait for the most expensive pack of a step."""
    pack_flops: float
    """Floating-point operations of the mean pack, forward and backward."""
    waiting_flops: float
    """Those that a device could compute for each of its packs while it waits."""
    time: float
    """Time of an epoch over that of full packs."""


def evenness_rows(costs: PackCosts, devices: Sequence[int], *, packs_per_device: int) -> list[EvennessRow]:
    """Returns a row for each number of devices and packing, and one for full packs of which a device gets several."""
    rows = []
    for count in devices:
        packings = costs.by_name(count)
        slowest = {name: expected_maximum_of_draws(values, count) for name, values in packings.items()}
        planned = planned_maximum(costs.full, count, packs_per_device=packs_per_device)
        packings["planned"], slowest["planned"] = costs.full, planned / packs_per_device
        for name, values in packings.items():
            mean = float(values.mean())
            rows.append(
                EvennessRow(
                    model=costs.model.name,
                    devices=count,
                    packs_are=name,
                    packs=len(values),
                    attention_share=1 - costs.of_slots / mean,
                    deviation=float(values.std()) / mean,
                    most=float(values.max()) / mean,
                    waiting=1 - mean / slowest[name],
                    pack_flops=mean * costs.model.unit_flops,
                    waiting_flops=(slowest[name] - mean) * costs.model.unit_flops,
                    time=len(values) * slowest[name] / (len(costs.full) * slowest["full"]),
                )
            )
    return rows


@dataclass(frozen=True, kw_only=True)
class ToleranceRow:
    """Whether devices with a pack each can wait no more than wanted, and what would do where full packs do not."""

    model: str
    devices: int
    met_by: Literal["full packs", "even packs", "perhaps another packing", "no packing"]
    full: float
    """Share of the devices' time that they wait with full packs."""
    least: float
    """The same of the bound for any packing into as many packs."""
    missed_by: float
    """By how much the bound is above the tolerance; 0 where it is not."""
    fewer_devices: int
    """The most devices, up to these, on which full packs meet it."""
    packs_by_arrival: int | None
    """Full packs per device in a step, as they come, with which these devices meet it; None: more than 64."""
    packs_planned: int | None
    """The same where a plan of the step assigns them by cost."""
    cut_at: int | None
    """Length at which longer sequences are cut so that full packs meet it; None: cutting them to 64 does not do."""


def tolerance_rows(costs: PackCosts, devices: Sequence[int], *, tolerance: float) -> list[ToleranceRow]:
    """Returns a row for each number of devices."""
    rows = []
    for count in devices:
        waiting = {name: _waiting(values, count) for name, values in costs.by_name(count).items()}
        met = (name for name in ("full", "even", "least") if waiting[name] <= tolerance)
        cuts = (cut for cut, values in _full_when_cut(costs) if _waiting(values, count) <= tolerance)
        rows.append(
            ToleranceRow(
                model=costs.model.name,
                devices=count,
                met_by=_MET_BY[next(met, None)],
                full=waiting["full"],
                least=waiting["least"],
                missed_by=max(0.0, waiting["least"] - tolerance),
                fewer_devices=bisect_left(
                    range(2, count + 1), True, key=lambda fewer: _waiting(costs.full, fewer) > tolerance
                )
                + 1,
                packs_by_arrival=_enough_packs(costs.full, count, tolerance, by_cost=False),
                packs_planned=_enough_packs(costs.full, count, tolerance, by_cost=True),
                cut_at=next(cuts, None),
            )
        )
    return rows


_MET_BY: dict[str | None, Literal["full packs", "even packs", "perhaps another packing", "no packing"]] = {
    "full": "full packs",
    "even": "even packs",
    "least": "perhaps another packing",
    None: "no packing",
}


def _waiting(costs: Float64[np.ndarray, " packs"], devices: int) -> float:
    return 1 - float(costs.mean()) / expected_maximum_of_draws(costs, devices)


def _enough_packs(costs: Float64[np.ndarray, " packs"], devices: int, tolerance: float, *, by_cost: bool) -> int | None:
    """Returns the least power of two of packs per device with which devices wait no more than the tolerance.

    One pack each is decided by its exact expectation, as in `ToleranceRow.full`; more are drawn.
    """
    if _waiting(costs, devices) <= tolerance:
        return 1
    for packs in _PACKS_PER_DEVICE:
        slowest = planned_maximum(costs, devices, packs_per_device=packs, by_cost=by_cost)
        if 1 - packs * float(costs.mean()) / slowest <= tolerance:
            return packs
    return None


def _full_when_cut(costs: PackCosts) -> Iterator[tuple[int, Float64[np.ndarray, " packs"]]]:
    """Yields a whole pack, a half, a quarter and so on, with the costs of full packs whose sequences are cut there."""
    cut = costs.pack_length
    while cut >= _SHORTEST_CUT:
        packing = pack(
            costs.histogram.fitted(cut, "split").histogram, "longest_pack_first", pack_length=costs.pack_length
        )
        yield cut, costs.of_slots + _attention_of(packing, costs.model)
        cut //= 2
