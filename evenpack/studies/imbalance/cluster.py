"""One step of a simulated cluster: items are drawn and assigned, micro-batches have a cost, and ranks wait."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64, Real

from evenpack.data.order.assignment import StepAssignment, assign_step, padded_width
from evenpack.data.order.step_plan import PackStatistics, item_costs
from evenpack.data.order.step_shape import (
    POLICIES,
    UNPADDED_SLOT_MULTIPLE,
    AssignmentPolicy,
    Batching,
    CostWeights,
    Layout,
    StepShape,
)
from evenpack.data.packing import LengthHistogram, Packing
from evenpack.errors import ConfigError
from evenpack.studies.imbalance.step_cost import StepCost

FEWEST_STEPS = 30
"""Least number of steps; below, an interval over steps is meaningless."""
_BATCHINGS: tuple[Batching, ...] = ("packs", "sequences")
"""The items that a step draws, in this order."""
_LAYOUTS: tuple[tuple[Batching, Layout], ...] = (
    ("packs", "packed"),
    ("sequences", "unpadded"),
    ("sequences", "padded"),
)


@dataclass(frozen=True, kw_only=True, eq=False)
class ItemKinds:
    """The kinds of items: sequences by length, or packs by strategy."""

    probabilities: Float64[np.ndarray, " kinds"]
    tokens: Int64[np.ndarray, " kinds"]
    """Real tokens of an item."""
    attended: Real[np.ndarray, " kinds"]
    """Sum over its sequences of the pairs that attention computes (`StepCost.attended`)."""
    padding_attended: Real[np.ndarray, " kinds"]
    """The same over the segments of padding in a pack."""
    sequences: Int64[np.ndarray, " kinds"]

    @property
    def mean_sequences(self) -> float:
        """Returns the mean sequences of an item."""
        return float(self.probabilities @ self.sequences)

    @property
    def work(self) -> Float64[np.ndarray, "kinds 2"]:
        """Returns the quantities on which times of steps depend linearly, apart from waiting and rounding."""
        return np.stack([self.tokens, self.attended + self.padding_attended], axis=1).astype(np.float64)

    def draw(self, generator: np.random.Generator, items: int) -> Int64[np.ndarray, " items"]:
        """Returns the kinds of independent items in random order: a shuffled sorted sample, which is fastest."""
        counts = generator.multinomial(items, self.probabilities)
        kinds = np.repeat(np.arange(len(counts), dtype=np.min_scalar_type(len(counts))), counts)
        generator.shuffle(kinds)
        return kinds.astype(np.int64)


def sequence_kinds(histogram: LengthHistogram, cost: StepCost) -> ItemKinds:
    """Returns a kind for each length that occurs."""
    lengths = np.flatnonzero(histogram.counts) + 1
    return ItemKinds(
        probabilities=histogram.counts[lengths - 1] / histogram.sequences,
        tokens=lengths,
        attended=cost.attended(lengths),
        padding_attended=np.zeros_like(lengths),
        sequences=np.ones_like(lengths),
    )


def pack_kinds(packing: Packing, cost: StepCost, *, max_sequence_length: int) -> ItemKinds:
    """Returns a kind for each strategy."""
    lengths, starts = packing.slot_lengths, np.cumsum(packing.depths) - packing.depths
    tokens = np.add.reduceat(lengths, starts)
    return ItemKinds(
        probabilities=packing.counts / packing.packs,
        tokens=tokens,
        attended=np.add.reduceat(cost.attended(lengths), starts),
        padding_attended=attended_padding(packing.pack_length - tokens, max_sequence_length, cost),
        sequences=packing.depths,
    )


def attended_padding(
    slots: Int64[np.ndarray, "*shape"], max_sequence_length: int, cost: StepCost
) -> Real[np.ndarray, "*shape"]:
    """Returns the pairs of attention in the segments of so many padding slots (`data/batches/placement.py`)."""
    whole, rest = np.divmod(slots, max_sequence_length)
    pairs: Real[np.ndarray, "*shape"] = whole * cost.attended(np.full_like(rest, max_sequence_length)) + cost.attended(
        rest
    )
    return pairs


def slowest_seconds(
    seconds: Float64[np.ndarray, "*steps ranks micro_batches"], *, waits_often: bool
) -> Float64[np.ndarray, "*steps"]:
    """Returns the seconds that each step waits for: of its slowest rank, or of the slowest of each micro-batch."""
    return np.asarray(seconds.max(axis=-2).sum(axis=-1) if waits_often else seconds.sum(axis=-1).max(axis=-1))


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """A layout, an assignment policy, and the kind of attention."""

    layout: Layout
    policy: AssignmentPolicy
    dense: bool = False
    """For packs: the square of the whole row is computed and then masked, as PackedBERT does, not each sequence's own
    square."""

    @property
    def label(self) -> str:
        return f"{self.layout} {self.policy}{', dense attention' if self.dense else ''}"

    @property
    def batching(self) -> Batching:
        """The items that are assigned."""
        return "packs" if self.layout == "packed" else "sequences"


BASELINE = Scheme(layout="padded", policy="arrival")
UNPADDED_ARRIVAL = Scheme(layout="unpadded", policy="arrival")
UNPADDED_BALANCED = Scheme(layout="unpadded", policy="cost_balanced")
BALANCED_PACKS = Scheme(layout="packed", policy="cost_balanced")
PACKS_BY_ARRIVAL = Scheme(layout="packed", policy="arrival")
DENSE_PACKS = Scheme(layout="packed", policy="arrival", dense=True)
"""Packs with dense attention, which all have the same cost for any assignment."""

SCHEMES: tuple[Scheme, ...] = (
    DENSE_PACKS,
    *(Scheme(layout=layout, policy=policy) for batching, layout in _LAYOUTS for policy in POLICIES[batching, layout]),
)


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """The work of every device in a step, and the number of steps.

    Raises: ConfigError, naming the option of the command line.
    """

    batch: int = 32
    """Sequences per micro-batch."""
    packs: int | None = None
    """Packs per micro-batch; None: as many as hold `batch` sequences on average, at least one."""
    accumulation: int = 1
    """Micro-batches per step and device."""
    zero_stage: int = 0
    """At 2 and 3 devices synchronise in every micro-batch, else once a step."""
    steps: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("batch", 1), ("packs", 1), ("accumulation", 1), ("steps", FEWEST_STEPS), ("seed", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"--{name} must be {least} or more, not {value}")
        if self.zero_stage not in (0, 1, 2, 3):
            raise ConfigError(f"--zero-stage is 0, 1, 2 or 3, not {self.zero_stage}")

    @property
    def waits_often(self) -> bool:
        """Whether ranks wait for each other in each micro-batch, and not once a step."""
        return self.zero_stage >= 2

    def packs_with(self, packing_factor: float) -> int:
        """Returns the packs of a micro-batch, where a pack has so many sequences on average."""
        return self.packs or max(1, round(self.batch / packing_factor))


@dataclass(frozen=True, kw_only=True, eq=False)
class Cluster:
    """Everything on which a step depends, except the number of devices."""

    sequences: ItemKinds
    packs: ItemKinds
    pack_length: int
    max_sequence_length: int
    """Width of padded rows that do not depend on their longest sequence."""
    packs_per_micro_batch: int
    cost: StepCost
    options: ClusterOptions

    def steps(
        self, devices: int, first: int, count: int, schemes: Sequence[Scheme] = SCHEMES
    ) -> Float64[np.ndarray, "schemes count 4"]:
        """Simulates steps `first` to `first + count` by each of `schemes`, as columns of `StepTimes`.

        A step is a function of (seed, devices, step). All schemes of single sequences get the same sequences in the
        same order, all schemes of packs the same packs.
        """
        found = np.empty((len(schemes), count, 4))
        for row, step in enumerate(range(first, first + count)):
            generator = np.random.default_rng((self.options.seed, devices, step))
            drawn = self._draw(generator, devices)
            for column, scheme in enumerate(schemes):
                draw = drawn[scheme.batching]
                found[column, row, :2] = self._step(scheme, draw, devices)
                found[column, row, 2:] = draw.work
        return found

    def items_per_step(self, batching: Batching, devices: int) -> int:
        """Returns the items of a step over all devices."""
        of_micro_batch = self.packs_per_micro_batch if batching == "packs" else self.options.batch
        return devices * self.options.accumulation * of_micro_batch

    def kinds(self, batching: Batching) -> ItemKinds:
        """Returns the kinds of the assigned items."""
        return self.packs if batching == "packs" else self.sequences

    def _draw(self, generator: np.random.Generator, devices: int) -> dict[Batching, "_Draw"]:
        drawn = {}
        for batching in _BATCHINGS:
            kinds = self.kinds(batching)
            items = kinds.draw(generator, self.items_per_step(batching, devices))
            work = np.bincount(items, minlength=len(kinds.tokens)) @ kinds.work / len(items)
            drawn[batching] = _Draw(items=items, tokens=kinds.tokens[items], work=work)
        return drawn

    def _step(self, scheme: Scheme, draw: "_Draw", devices: int) -> tuple[float, float]:
        shape = self.shape(scheme, devices)
        shares = assign_step(shape, draw.tokens, self._assignment_costs(shape, draw), ranks=devices)
        seconds = self.micro_batch_seconds(scheme, draw.items, shares).reshape(devices, self.options.accumulation)
        slowest = float(slowest_seconds(seconds, waits_often=self.options.waits_often)) + self.cost.per_step
        mean = float(seconds.sum()) / devices + self.cost.per_step
        return slowest, mean

    def shape(self, scheme: Scheme, devices: int) -> StepShape:
        """Returns the shape of a training step of this scheme on so many devices, with this cost model."""
        cost = self.cost
        weights = CostWeights(
            per_token=cost.per_slot, per_squared_length=cost.per_squared_length, per_segment=cost.per_segment
        )
        return StepShape(
            batching=scheme.batching,
            items_per_step=self.items_per_step(scheme.batching, devices),
            items_per_micro_batch=self.items_per_step(scheme.batching, 1) // self.options.accumulation,
            layout=scheme.layout,
            isolate=True,
            reset_positions=True,
            policy=scheme.policy,
            cost_weights=weights.in_layout(scheme.layout),
            windows=(),
            balances_each_micro_batch=self.options.waits_often,
        )

    def _assignment_costs(self, shape: StepShape, draw: "_Draw") -> Float64[np.ndarray, " items"]:
        if shape.policy != "cost_balanced":
            return np.zeros(len(draw.items))
        kinds = self.kinds(shape.batching)
        of_kind = item_costs(
            shape.cost_weights,
            PackStatistics(
                tokens=kinds.tokens, squared_lengths=kinds.attended, segments=kinds.sequences, pairs_within={}
            ),
        )
        return of_kind[draw.items]

    def micro_batch_seconds(
        self, scheme: Scheme, items: Int64[np.ndarray, " items"], shares: StepAssignment
    ) -> Float64[np.ndarray, " shares"]:
        """Returns seconds of the micro-batches of a step's `items` (their kinds), without noise."""
        kinds, longest = self.kinds(scheme.batching), self.max_sequence_length
        starts, assigned = shares.offsets[:-1], items[shares.items]
        counts = np.diff(shares.offsets)
        tokens = np.add.reduceat(kinds.tokens[assigned], starts)
        attended = np.add.reduceat(kinds.attended[assigned], starts)
        sequences = counts
        if scheme.layout == "packed":
            slots = counts * self.pack_length
            attended = attended + np.add.reduceat(kinds.padding_attended[assigned], starts)
            attended = counts * self.pack_length**2 if scheme.dense else attended
            sequences = np.add.reduceat(kinds.sequences[assigned], starts)
        elif scheme.layout == "unpadded":
            slots = -(-tokens // UNPADDED_SLOT_MULTIPLE) * UNPADDED_SLOT_MULTIPLE
            attended = attended + attended_padding(slots - tokens, longest, self.cost)
        else:
            width = padded_width(scheme.policy, np.maximum.reduceat(kinds.tokens[assigned], starts), longest)
            slots = counts * width
            if self.cost.causal:
                attended = counts * self.cost.attended(width)
            else:  # the padding behind each sequence is a segment of its own
                behind = np.repeat(width, counts) - kinds.tokens[assigned]
                attended = attended + np.add.reduceat(self.cost.attended(behind), starts)
        return self.cost.seconds(slots, attended, sequences)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Draw:
    """The items of a step, to be assigned."""

    items: Int64[np.ndarray, " items"]
    """Kinds of the items."""
    tokens: Int64[np.ndarray, " items"]
    work: Float64[np.ndarray, "2"]
    """`ItemKinds.work` of the mean item."""
