"""One rank of many, rehearsed in a process that has neither its devices nor the other ranks.

Its packs are planned, assigned and collated as in training. One step is faked with them: the model, the engine and
DeepSpeed run as they are, as that rank of a process group whose collectives do nothing, on tensors that have shapes and
no numbers. Attention is computed by the formula, since nothing is computed.
"""

import os
import socket
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from evenpack.batch import PackedBatch
from evenpack.data.batches.pipeline import MicroBatchDataset
from evenpack.engine.build import build_model
from evenpack.engine.engine import Phase, TrainingEngine
from evenpack.engine.memory.estimate import MicroBatchSize, training_memory
from evenpack.engine.memory.phases import TrainingMemory
from evenpack.engine.resolving.resolve import ResolvedRun
from evenpack.engine.world.distributed import World, quiet_deepspeed
from evenpack.errors import ConfigError
from evenpack.models.trace import place_parameters

_CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class RankRehearsal:
    """What one rank would do in a run's first step."""

    rank: int
    ranks: int
    items: tuple[int, ...]
    """Packs, or single sequences, of each micro-batch."""
    sequences: int
    tokens: int
    """Real tokens."""
    tokens_of_the_mean_rank: float
    targets: int
    slots: tuple[int, ...]
    """Slots of each micro-batch."""
    cost_over_mean: float
    """Cost of the rank over the mean of all ranks, by the weights with which the run balances; 1 where all are 0."""
    largest_cost_over_mean: float
    """Cost of the most expensive rank, for which all others wait, over the mean of all ranks."""
    memory: TrainingMemory
    """Memory of the largest micro-batch on a GPU, estimated."""
    faked_gradients: int
    """Numbers of the gradient that the faked step has computed and reduced: all of the model's parameters."""


def rehearse(run: ResolvedRun, *, rank: int, ranks: int) -> RankRehearsal:
    """Plans, collates and fakes the first step of one rank; to be called once in a process.

    Raises: ConfigError if the rank is not among the ranks, or these cannot divide a step; DataError for damaged data.
    """
    if not 0 <= rank < ranks:
        raise ConfigError(f"--rank {rank}: {ranks:,} ranks have the numbers from 0 to {ranks - 1:,}")
    run.settled.micro_batches(ranks)
    world = World(rank=rank, size=ranks, local_rank=0, device=_CPU)
    dataset = MicroBatchDataset(run.prepared, run.pipeline_settings(world))
    plan = dataset.planner.plan(0)
    batches = [dataset[index] for index in range(plan.micro_batches)]
    costs = [plan.cost(each) for each in range(ranks)]
    mean = sum(costs) / ranks
    largest = max(batches, key=lambda batch: batch.slots)
    size = MicroBatchSize(slots=largest.slots, head_rows=largest.head_rows)
    return RankRehearsal(
        rank=rank,
        ranks=ranks,
        items=tuple(batch.local_counts.packs for batch in batches),
        sequences=sum(batch.local_counts.sequences for batch in batches),
        tokens=sum(batch.local_counts.tokens for batch in batches),
        tokens_of_the_mean_rank=plan.counts.tokens / ranks,
        targets=sum(batch.local_counts.targets for batch in batches),
        slots=tuple(batch.slots for batch in batches),
        cost_over_mean=costs[rank] / mean if mean else 1.0,
        largest_cost_over_mean=max(costs) / mean if mean else 1.0,
        memory=training_memory(run.config, size, vocabulary_size=run.prepared.vocabulary_size, ranks=ranks),
        faked_gradients=_fake_step(run, world, batches),
    )


def _fake_step(run: ResolvedRun, world: World, batches: Sequence[PackedBatch]) -> int:
    """Makes a step of DeepSpeed's engine without numbers and without others; returns the size of its gradient."""
    attention = run.config.attention.model_copy(update={"backend": "reference"})
    # A norm without a value would be left out, and there is nothing to compile.
    training = run.config.training.model_copy(update={"on_nan": "stop", "compile": False})
    # From ZeRO 2 on no whole gradient is left to be counted, and at 3 DeepSpeed compares ranks that do not exist.
    stage = min(run.config.deepspeed.zero_stage, 1)
    deepspeed = run.config.deepspeed.model_copy(update={"zero_stage": stage})
    sections = {"attention": attention, "training": training, "deepspeed": deepspeed, "stages": ()}
    faked = replace(run, config=run.config.model_copy(update=sections))
    with _joined(world), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model = build_model(faked, torch.device("meta"))
        place_parameters(model)
        model.to = lambda *_, **__: model  # type: ignore[method-assign]  # torch cannot move them, and they are there
        engine = TrainingEngine(model, faked.config, world, denominators=faked.denominators)
        gradients: list[int] = []

        def count(phase: Phase) -> None:
            if phase == "backward":
                found = (parameter.grad for parameter in engine.model.parameters())
                gradients.append(sum(gradient.numel() for gradient in found if gradient is not None))

        engine.observer = count
        with _Ones():  # type: ignore[no-untyped-call]
            engine.train_step(0, [_faked(batch, mode) for batch in batches])
        return gradients[-1]


@contextmanager
def _joined(world: World) -> Iterator[None]:
    """Makes this process a rank of a group whose other ranks do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ.update(
        RANK=str(world.rank),
        WORLD_SIZE=str(world.size),
        LOCAL_RANK=str(world.local_rank),
        MASTER_ADDR=socket.gethostname(),
        DS_ACCELERATOR="cpu",
    )
    deepspeed = quiet_deepspeed()
    warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")  # DeepSpeed's alignment check
    dist.init_process_group("fake", rank=world.rank, world_size=world.size, store=FakeStore())
    yield
    deepspeed.comm.destroy_process_group()


def _faked(batch: PackedBatch, mode: FakeTensorMode) -> PackedBatch:
    """Returns the batch with tensors that have its shapes and no numbers, but for boundaries, which are checked."""

    def faked(tensor: Tensor) -> Tensor:
        return tensor if tensor is batch.cu_seqlens else mode.from_tensor(tensor)

    return batch.with_tensors(faked)


class _Ones(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers the questions for numbers that there are none of: 1, and no to questions of yes and no."""

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        if operator.overloadpacket is torch.ops.aten._local_scalar_dense:
            return 0 if arguments[0].dtype == torch.bool else 1
        return operator(*arguments, **(named or {}))
