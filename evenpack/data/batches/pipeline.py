"""Prepared data -> micro-batches for one rank, prefetched by worker processes without changing their order."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import xxhash
from torch.utils.data import DataLoader, Dataset

from evenpack.batch import PackedBatch, StepCounts
from evenpack.data.batches.collate import Collator
from evenpack.data.batches.objectives import Objective
from evenpack.data.order.step_plan import Assignment, PackedSource, StepPlan, StepPlanner
from evenpack.data.order.step_shape import AssignmentPolicy, BatchForm, Batching
from evenpack.data.prepared import PreparedData

Split = Literal["train", "validation"]


@dataclass(frozen=True, kw_only=True)
class PipelineSettings:
    """What decides the batches of one rank; seed, packs_per_step and batching decide which sequences form a step."""

    seed: int
    objective: Objective
    packs_per_step: int
    """Or single sequences, each a pack of one; so too the next field."""
    packs_per_micro_batch: int
    form: BatchForm
    ranks: int
    rank: int
    per_micro_batch_balance: bool
    """True at ZeRO 2 and 3."""
    cost_weights: tuple[float, float]
    """Attention cost of a token and of a squared sequence length, in any one unit."""
    loader_workers: int
    pin_memory: bool = False
    batching: Batching = "packs"
    assignment: AssignmentPolicy = "cost_balanced"

    @property
    def micro_batches(self) -> int:
        """Of each rank in each step."""
        return self.packs_per_step // (self.ranks * self.packs_per_micro_batch)


@dataclass(frozen=True, kw_only=True)
class StepBatches:
    """One rank's share of one step."""

    step: int
    """From 0."""
    micro_batches: tuple[PackedBatch, ...]

    @property
    def counts(self) -> StepCounts:
        """Of the whole step over all ranks."""
        return self.micro_batches[0].step_counts


class MicroBatchDataset(Dataset[PackedBatch]):
    """Item i is micro-batch i % A of step i // A of one rank, for A micro-batches a step.

    A pure function of the index. Picklable: worker processes map the files again.
    """

    def __init__(self, prepared: PreparedData, settings: PipelineSettings) -> None:
        self.prepared = prepared
        self.settings = settings
        sources = packed_sources(prepared, "train", seed=settings.seed, batching=settings.batching)
        self.collator = _collator(
            prepared,
            sources,
            form=settings.form,
            objective=settings.objective,
            packs_per_micro_batch=settings.packs_per_micro_batch,
            assignment=settings.assignment,
        )
        self.planner = StepPlanner(
            sources,
            prepared.weights,
            packs_per_step=settings.packs_per_step,
            assignment=Assignment(
                ranks=settings.ranks,
                micro_batches=settings.micro_batches,
                per_micro_batch=settings.per_micro_batch_balance,
                cost_per_token=settings.cost_weights[0],
                cost_per_squared_length=settings.cost_weights[1],
                policy=settings.assignment,
                layout=settings.form.layout,
            ),
            objective=settings.objective,
        )
        self._planned: StepPlan | None = None

    def __reduce__(self) -> tuple[type["MicroBatchDataset"], tuple[PreparedData, PipelineSettings]]:
        return type(self), (self.prepared, self.settings)

    def __getitem__(self, index: int) -> PackedBatch:
        step, micro_batch = divmod(index, self.settings.micro_batches)
        if self._planned is None or self._planned.step != step:
            self._planned = self.planner.plan(step)
        packs = self._planned.micro_batch(self.settings.rank, micro_batch)
        return self.collator.collate(packs, self._planned.counts)


def training_batches(
    prepared: PreparedData, settings: PipelineSettings, *, start_step: int, stop_step: int
) -> Iterator[StepBatches]:
    """The steps from `start_step` up to `stop_step`, in order. Starting anywhere costs the same."""
    per_step = settings.micro_batches
    loader = DataLoader(
        MicroBatchDataset(prepared, settings),
        sampler=range(start_step * per_step, stop_step * per_step),
        batch_size=None,
        collate_fn=_as_it_is,
        worker_init_fn=_outlive_stop_signals,
        num_workers=settings.loader_workers,
        # Forking a process that holds a process group or a CUDA context is undefined behaviour.
        multiprocessing_context="spawn" if settings.loader_workers else None,
        prefetch_factor=min(2 * per_step, _MOST_PREFETCHED) if settings.loader_workers else None,
        pin_memory=settings.pin_memory,
    )
    with _blocked_stop_signals():  # which the workers inherit, until they can answer for themselves
        batches = iter(loader)
    for step in range(start_step, stop_step):
        yield StepBatches(step=step, micro_batches=tuple(next(batches) for _ in range(per_step)))


def evaluation_batches(
    prepared: PreparedData,
    source: str,
    *,
    objective: Objective,
    packs_per_micro_batch: int,
    form: BatchForm,
    rank: int,
    ranks: int,
    max_packs: int | None,
    seed: int,
) -> Iterator[PackedBatch]:
    """This rank's share of a source's validation packs, each pack once over all ranks, in a fixed order.

    What is asked of them is the same for every seed. The last batch may hold fewer packs, and a rank may get fewer
    batches than another.
    """
    index = prepared.source_names.index(source)
    packed = packed_sources(prepared, "validation", seed=seed, only=source)
    fixed = objective.for_validation()
    collator = _collator(
        prepared,
        packed,
        form=form,
        objective=fixed,
        packs_per_micro_batch=packs_per_micro_batch,
        assignment="arrival",
    )
    planner = StepPlanner(packed, [1], packs_per_step=1, assignment=_UNASSIGNED, objective=fixed)
    packs = packed[0].plan.packs if max_packs is None else min(max_packs, packed[0].plan.packs)
    mine = np.arange(rank, packs, ranks)
    for first in range(0, len(mine), packs_per_micro_batch):
        chosen = mine[first : first + packs_per_micro_batch]
        selection = planner.select(np.zeros(len(chosen), dtype=np.int64), chosen)
        batch = collator.collate(selection, _NO_COUNTS)
        tokens = [0] * len(prepared.source_names)
        tokens[index] = batch.local_counts.tokens
        yield replace(batch, step_counts=batch.local_counts, source_tokens=tuple(tokens))


def packed_sources(
    prepared: PreparedData, split: Split, *, seed: int, only: str | None = None, batching: Batching = "packs"
) -> tuple[PackedSource, ...]:
    """Views and plans of one split, in the mixture's order."""
    names = prepared.source_names if only is None else (only,)
    return tuple(
        PackedSource(
            view=prepared.view(name, split),
            plan=prepared.plan(name, split, seed=seed, batching=batching),
            key=xxhash.xxh3_64_intdigest(name.encode()),
        )
        for name in names
    )


_MOST_PREFETCHED = 32
"""Micro-batches a worker; each holds six shared-memory files open, and 1,024 are a usual limit."""
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_UNASSIGNED = Assignment(
    ranks=1, micro_batches=1, per_micro_batch=False, cost_per_token=1.0, cost_per_squared_length=0.0
)
_NO_COUNTS = StepCounts(packs=0, sequences=0, tokens=0, targets=0)


def _collator(
    prepared: PreparedData,
    sources: tuple[PackedSource, ...],
    *,
    form: BatchForm,
    objective: Objective,
    packs_per_micro_batch: int,
    assignment: AssignmentPolicy,
) -> Collator:
    return Collator(
        sources,
        form=form,
        objective=objective,
        pack_length=prepared.pack_length,
        packs_per_micro_batch=packs_per_micro_batch,
        padding_token=prepared.end_of_text_id,
        vocabulary_size=prepared.vocabulary_size,
        assignment=assignment,
    )


def _as_it_is(batch: Any) -> Any:
    return batch


@contextmanager
def _blocked_stop_signals() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _outlive_stop_signals(_worker: int) -> None:
    """A run that is asked to stop needs its batches until the end of the step, and `deepspeed` signals loaders too.

    A second SIGTERM ends the worker: that is how the loader itself ends those that do not leave by themselves.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)
