"""Plans the steps of fine-tuning, which end with each epoch, and makes their targets of the sequences' labels.

The steps are a function of (seed, epoch), the same in every layout. A step of training counts sequences, which the
packed layout packs step by step; one of an evaluation counts packs of a single packing of all sequences. Each epoch has
every sequence once; its last step may be smaller. The steps of pretraining (`data/order/step_plan.py`) go on from one
epoch into the next instead.

Shapes: N = sequences of the task's file, M = sequences of a step, P = packs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from evenpack.batch import ChosenTargets
from evenpack.data.batches.objectives import Task, filled, rounded_size, token_types
from evenpack.data.batches.placement import Placement
from evenpack.data.keys import derive_key
from evenpack.data.order.assignment import StepAssignment
from evenpack.data.order.plan import PackPlan, sort_by_length
from evenpack.data.order.selection import PackedSource, PackSelection, select_packs
from evenpack.data.order.step_plan import StepPlan
from evenpack.data.order.step_shape import StepShape
from evenpack.data.packing import LengthHistogram, pack
from evenpack.data.permutation import permute
from evenpack.data.sequences import LabelledSequences, SequenceContent, SequenceCounts, SequenceView
from evenpack.losses import Loss, StepCounts

_SEQUENCE_ORDER = 2
"""Purpose of a key; `PackPlan` uses 0 and 1."""


def packed_source(sequences: LabelledSequences, *, seed: int) -> PackedSource:
    """Returns the sequences of a file, packed into rows of the greatest length that they may have."""
    plan = _plan(sequences.lengths().astype(np.int64), "auto", pack_length=sequences.max_sequence_length, seed=seed)
    return PackedSource(view=sequences, plan=plan, key=0)


def _plan(lengths: Int64[np.ndarray, " N"], algorithm: str, *, pack_length: int, seed: int) -> PackPlan:
    histogram = LengthHistogram.from_lengths(lengths, longest=pack_length)
    packing = pack(histogram, algorithm, pack_length=pack_length)
    return PackPlan(packing, sort_by_length(lengths, histogram), key=int(derive_key(seed)))


@dataclass(frozen=True, kw_only=True, eq=False)
class EpochPlanner:
    """Plans any step of any epoch, for one rank; steps count on from 0 over the epochs."""

    source: PackedSource
    shape: StepShape
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        return -(-self._items_per_epoch // self.shape.items_per_step)

    def plan(self, step: int) -> StepPlan:
        """Plans a step; a sequence that is not packed is a pack of its own. Reads lengths, never tokens."""
        packs = self._draw(step)
        sequences = len(packs.sequence_ids)
        size = self.shape.items_per_micro_batch
        offsets = np.append(np.arange(0, packs.packs, size), packs.packs)
        return StepPlan(
            step=step,
            packs=packs,
            counts=StepCounts(
                packs=packs.packs, sequences=sequences, tokens=int(packs.lengths.sum()), targets=sequences
            ),
            assignment=StepAssignment(items=np.arange(packs.packs), offsets=offsets),
            costs=np.zeros(packs.packs),
            micro_batches=len(offsets) - 1,
        )

    @property
    def _items_per_epoch(self) -> int:
        return self.source.plan.packs if self.shape.batching == "packs" else self.source.plan.sequences

    def _draw(self, step: int) -> PackSelection:
        epoch, index = divmod(step, self.steps_per_epoch)
        first, items = index * self.shape.items_per_step, self._items_per_epoch
        drawn = np.arange(first, min(first + self.shape.items_per_step, items))
        if self.shape.batching == "packs":
            return select_packs([self.source], np.zeros_like(drawn), epoch * items + drawn)
        key = derive_key(self.seed, _SEQUENCE_ORDER, epoch)
        return self._selected(permute(drawn, np.full_like(drawn, items), np.full(len(drawn), key, dtype=np.uint64)))

    def _selected(self, sequence_ids: Int64[np.ndarray, " M"]) -> PackSelection:
        """Returns these sequences, packed with each other if the layout packs."""
        lengths = self.source.view.lengths()[sequence_ids].astype(np.int64)
        offsets = np.arange(len(sequence_ids) + 1)
        if self.shape.layout == "packed":
            plan = _plan(lengths, "longest_pack_first", pack_length=self.source.plan.pack_length, seed=self.seed)
            drawn = plan.draw(np.arange(plan.packs))
            offsets, sequence_ids, lengths = drawn.offsets, sequence_ids[drawn.sequence_ids], drawn.lengths
        packs = len(offsets) - 1
        return PackSelection(
            sources=np.zeros(packs, dtype=np.int64),
            stream_positions=np.arange(packs),
            offsets=offsets,
            sequence_ids=sequence_ids,
            lengths=lengths,
        )


@dataclass(frozen=True, kw_only=True)
class SequenceLabels:
    """The label that a task's file gives each of its sequences: a class, a score, or the span of an answer."""

    loss: Loss
    """The loss of the head that predicts it."""
    is_bidirectional = True

    def check(self, view: SequenceView) -> None:
        assert isinstance(view, LabelledSequences), "no recipe makes sequences with labels"

    def count_targets(
        self, view: SequenceView, sequence_ids: Int64[np.ndarray, " K"], counts: SequenceCounts
    ) -> Int64[np.ndarray, " K"]:
        return np.ones_like(counts.lengths)

    def for_validation(self) -> "SequenceLabels":
        return self

    def make(
        self, content: SequenceContent, placement: Placement, packs: PackSelection, sources: Sequence[PackedSource]
    ) -> Task:
        labels = content.labels
        assert labels is not None, "checked when the collator was made"
        tokens, weight = content.starts, 1.0
        if labels.ndim == 2:  # the tokens at which an answer begins and ends
            tokens, weight = (content.starts[:, None] + labels).reshape(-1), 0.5
            labels = np.tile([0, 1], len(content.lengths))
        size = rounded_size(len(labels))
        targets = ChosenTargets(
            positions=filled(placement.slot_of_token[tokens], size),
            labels=filled(labels, size),
            weights=filled(np.full(len(labels), weight, dtype=np.float32), size),
        )
        return Task(
            tokens=content.tokens,
            token_types=token_types(content),
            targets={self.loss.name: targets},
            target_count=len(content.lengths),
        )
