"""Micro-batches of one rank, prefetched by worker processes in a fixed order; only these load torch."""

from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Protocol, runtime_checkable

import numpy as np

from evenpack.batch import PackedBatch
from evenpack.data.batches.collate import Collator
from evenpack.data.batches.objectives import Objective
from evenpack.data.batches.read_ahead import ReadAhead
from evenpack.data.order.selection import PackedSource, select_packs
from evenpack.data.order.skipped_steps import NO_STEPS, SkippedSteps
from evenpack.data.order.stages import Stage
from evenpack.data.order.step_plan import StepPlan, StepPlanner
from evenpack.data.order.step_shape import Batching, StepShape
from evenpack.data.prepared import PreparedData, Split, packed_sources
from evenpack.losses import NO_COUNTS, StepCounts


@runtime_checkable
class TrainingData(Protocol):
    """Sequences that form packs: prepared data, or documents of somebody else. Pickled for each worker process."""

    @property
    def weights(self) -> tuple[int, ...]:
        """Weights of the sources, from the first step on."""

    @property
    def pack_length(self) -> int:
        """Slots of a pack."""

    @property
    def end_of_text_id(self) -> int:
        """The token in slots of padding."""

    @property
    def vocabulary_size(self) -> int: ...

    def training_sources(self, *, seed: int, batching: Batching) -> tuple[PackedSource, ...]:
        """Returns views and plans of the training sequences, in the mixture's order."""


@dataclass(frozen=True, kw_only=True)
class PipelineSettings:
    """The settings that decide the batches of one rank; seed and shape decide which sequences form a step."""

    seed: int
    objective: Objective
    shape: StepShape
    """How steps are formed; in the first stage, if there are any."""
    ranks: int
    rank: int
    loader_workers: int
    pin_memory: bool
    stages: tuple[Stage, ...] = ()
    """All stages; empty: each step has the weights of the data, and this shape."""

    @property
    def micro_batches(self) -> int:
        """Micro-batches of each rank in each step; in the first stage, if there are any."""
        return self.shape.micro_batches(self.ranks)


@dataclass(frozen=True, kw_only=True)
class StepBatches:
    """One rank's part of one step."""

    step: int
    """The step, counted from 0."""
    micro_batches: tuple[PackedBatch, ...]

    @property
    def counts(self) -> StepCounts:
        """Counts of the whole step over all ranks."""
        return self.micro_batches[0].step_counts


@dataclass(frozen=True, kw_only=True)
class SkippedStep:
    """A skipped step, whose data is not read."""

    step: int
    """The step, counted from 0."""
    counts: StepCounts
    """Counts that the step would have had over all ranks."""


class MicroBatchDataset:
    """The micro-batches of one rank, numbered through all steps: item i is i % A of step i // A for A in each step.

    Items are a pure function of the index. The dataset is picklable: worker processes map the files again.
    """

    def __init__(self, data: TrainingData, settings: PipelineSettings) -> None:
        self.data = data
        self.settings = settings
        sources = data.training_sources(seed=settings.seed, batching=settings.shape.batching)
        self.planner = StepPlanner(
            sources,
            data.weights,
            shape=settings.shape,
            ranks=settings.ranks,
            objective=settings.objective,
            stages=settings.stages,
        )
        made = {
            shape.items_per_micro_batch: _collator(data, sources, shape=shape, objective=settings.objective)
            for shape in self.planner.shapes
        }
        self._collators = [made[shape.items_per_micro_batch] for shape in self.planner.shapes]
        self.collator = self._collators[0]
        self.read_ahead = ReadAhead(sources)
        self._planned: StepPlan | None = None

    def __reduce__(self) -> tuple[type["MicroBatchDataset"], tuple[TrainingData, PipelineSettings]]:
        return type(self), (self.data, self.settings)

    def __getitem__(self, index: int) -> PackedBatch:
        return self.arrays(index).tensors()

    def arrays(self, index: int) -> PackedBatch[np.ndarray]:
        """Returns item `index` as numpy arrays."""
        step, micro_batch = self.planner.micro_batches.place(index)
        if self._planned is None or self._planned.step != step:
            self._planned = self.planner.plan(step)
            self.read_ahead.follow(self._planned.packs)
        place = (self.settings.rank, micro_batch)
        packs, cost = self._planned.micro_batch(*place), self._planned.cost_of(*place)
        collator = self._collators[self.planner.order.index_at(step)]
        return collator.collate_arrays(packs, self._planned.counts, cost=cost)


def training_batches(
    data: TrainingData,
    settings: PipelineSettings,
    *,
    start_step: int,
    stop_step: int,
    skipped: SkippedSteps = NO_STEPS,
) -> Generator[StepBatches | SkippedStep]:
    """Returns the steps from `start_step` up to `stop_step`, in order. The cost does not depend on the start.

    The worker processes start at the call, and end when the generator is closed. `skipped` steps are planned but not
    read.
    """
    from torch.utils.data import DataLoader

    from evenpack.data.batches.flat import FlatBatch
    from evenpack.data.batches.loader_processes import (
        LoaderNames,
        begin_loader_process,
        explained_lost_loader,
        stop_signals_blocked,
    )
    from evenpack.worker_pool import named_semaphores

    dataset = MicroBatchDataset(data, settings)
    numbers = dataset.planner.micro_batches
    most = max(numbers.size(stage.step) for stage in dataset.planner.order.stages)
    kept = skipped.gaps(start_step, stop_step)
    loader: DataLoader[FlatBatch] = DataLoader(
        dataset,  # type: ignore[arg-type]  # no subclass of torch's Dataset, which would load torch to plan a step
        sampler=chain.from_iterable(range(numbers.before(start), numbers.before(stop)) for start, stop in kept),
        batch_size=None,
        collate_fn=FlatBatch.of,  # type: ignore[arg-type]  # without a batch_size it is given single items
        worker_init_fn=begin_loader_process,
        num_workers=settings.loader_workers,
        # Forking a process that holds a process group or a CUDA context is undefined behaviour.
        multiprocessing_context="spawn" if settings.loader_workers else None,
        prefetch_factor=min(2 * most, _MOST_PREFETCHED) if settings.loader_workers else None,
        pin_memory=settings.pin_memory,
    )
    others = named_semaphores()
    with stop_signals_blocked(), explained_lost_loader():  # its processes inherit this until they have own handlers
        batches = iter(loader)
    names = LoaderNames(settings.loader_workers, named_semaphores() - others)

    def steps() -> Generator[StepBatches | SkippedStep]:
        taken = 0
        for step in range(start_step, stop_step):
            if step in skipped:
                yield SkippedStep(step=step, counts=dataset.planner.plan(step).counts)
            else:
                count = numbers.size(step)
                with explained_lost_loader():
                    micro_batches = tuple(next(batches).batch() for _ in range(count))
                taken += count
                names.taken(taken)
                yield StepBatches(step=step, micro_batches=micro_batches)

    return steps()


def evaluation_batches(
    prepared: PreparedData,
    source: str,
    *,
    objective: Objective,
    shape: StepShape,
    rank: int,
    ranks: int,
    max_packs: int | None,
    seed: int,
    split: Split = "validation",
) -> Iterator[PackedBatch]:
    """Yields this rank's part of the packs of a source's split, each pack once over all ranks, in a fixed order.

    The targets are the same for every seed. The last batch may hold fewer packs, and a rank may get fewer batches than
    another.

    Args:
        shape: only its layout of micro-batches counts; packs are taken in order.
    """
    index = prepared.source_names.index(source)
    packed = packed_sources(prepared, split, seed=seed, only=source)
    collator = _collator(prepared, packed, shape=shape, objective=objective.for_validation())
    packs = packed[0].plan.packs if max_packs is None else min(max_packs, packed[0].plan.packs)
    mine = np.arange(rank, packs, ranks)
    for first in range(0, len(mine), shape.items_per_micro_batch):
        chosen = mine[first : first + shape.items_per_micro_batch]
        selection = select_packs(packed, np.zeros(len(chosen), dtype=np.int64), chosen)
        batch = collator.collate(selection, NO_COUNTS)
        tokens = [0] * len(prepared.source_names)
        tokens[index] = batch.local_counts.tokens
        yield replace(batch, step_counts=batch.local_counts, source_tokens=tuple(tokens))


_MOST_PREFETCHED = 32
"""Micro-batches per worker; each keeps a shared-memory file open, and 1,024 is a usual limit of files."""


def _collator(
    data: TrainingData,
    sources: tuple[PackedSource, ...],
    *,
    shape: StepShape,
    objective: Objective,
) -> Collator:
    return Collator(
        sources,
        shape=shape,
        objective=objective,
        pack_length=data.pack_length,
        padding_token=data.end_of_text_id,
        vocabulary_size=data.vocabulary_size,
        fills_rows=shape.policy != "max_tokens",
    )
