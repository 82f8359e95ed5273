"""Adapts each packer by a function that takes a task and returns an attempt.

Each function calls the installed package and repeats none of its internals; the processing with which a framework
surrounds its packing function on real data is done here too. Packers that move tokens get sequence i as tokens that are
all i (or i + 1 where 0 is the padding), so that their packs show which sequences they hold.
"""

from collections.abc import Callable, Iterator
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np
from import_alone import import_alone
from task import Attempt, Packed, Task

from evenpack.data.order.plan import PackPlan, sort_by_length
from evenpack.data.packing import pack

GROUP_OF_DATASETS_MAP = 1000
"""Batch size of `datasets.map(batched=True)`, and of LLaMA-Factory and ms-swift."""

_PACKS_DRAWN_TOGETHER = 1 << 16

_of_sequences = partial(Packed.from_lists, holds="sequences")
_of_lengths = partial(Packed.from_lists, holds="lengths")


def evenpack(task: Task, *, algorithm: str) -> Attempt:
    """Assigns sequences to packs: counts and packs lengths, sorts sequences, and draws one epoch of packs."""

    def run() -> tuple[np.ndarray, np.ndarray]:
        histogram = task.histogram
        packing = pack(
            histogram,
            algorithm,
            pack_length=task.pack_length,
            max_sequences_per_pack=task.max_sequences_per_pack,
        )
        plan = PackPlan(packing, sort_by_length(task.lengths, histogram), key=1)
        members = np.empty(plan.sequences, dtype=np.int32)
        sizes = np.empty(plan.packs, dtype=np.int32)
        filled = 0
        for first in range(0, plan.packs, _PACKS_DRAWN_TOGETHER):
            places = np.arange(first, min(first + _PACKS_DRAWN_TOGETHER, plan.packs))
            drawn = plan.draw(places)
            sizes[places] = np.diff(drawn.offsets)
            members[filled : filled + len(drawn.sequence_ids)] = drawn.sequence_ids
            filled += len(drawn.sequence_ids)
        return members, sizes

    return Attempt(run=run, read=lambda packs: Packed(members=packs[0], sizes=packs[1], holds="sequences"))


def trl(task: Task, *, group: int | None) -> Attempt:
    import pyarrow
    from datasets import Dataset
    from trl import pack_dataset

    offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(task.lengths)])
    tokens = np.repeat(np.arange(len(task.lengths), dtype=np.int32), task.lengths)
    column = pyarrow.LargeListArray.from_arrays(pyarrow.array(offsets), pyarrow.array(tokens))
    dataset = Dataset(pyarrow.table({"input_ids": column}))
    del tokens

    def read(packed: Any) -> Packed:
        members, sizes = [], []
        for batch in packed.with_format("arrow").iter(batch_size=10_000):
            begins = batch["seq_lengths"].combine_chunks()
            lengths = begins.flatten().to_numpy()
            sizes.append(begins.value_lengths().to_numpy())
            members.append(batch["input_ids"].combine_chunks().flatten().to_numpy()[np.cumsum(lengths) - lengths])
        return Packed(members=np.concatenate(members), sizes=np.concatenate(sizes), holds="sequences")

    map_kwargs = {"batch_size": group or len(task.lengths)}
    return Attempt(
        run=lambda: pack_dataset(dataset, seq_length=task.pack_length, strategy="bfd", map_kwargs=map_kwargs),
        read=read,
    )


def lightbinpack(task: Task, *, algorithm: str) -> Attempt:
    import lightbinpack as package

    lengths = task.lengths.tolist()
    return Attempt(run=lambda: package.pack(lengths, task.pack_length, strategy=algorithm), read=_of_sequences)


def axolotl(task: Task) -> Attempt:
    """Packs groups of 100,000 with at most 200 sequences per pack, the defaults of its configuration."""
    from torch.utils.data import SequentialSampler

    multipack = import_alone("axolotl.utils.samplers.multipack")

    def run() -> list[list[list[int]]]:
        sampler = multipack.MultipackBatchSampler(
            SequentialSampler(range(len(task.lengths))),
            batch_size=1,
            batch_max_len=task.pack_length,
            lengths=task.lengths,
            bin_size=task.max_sequences_per_pack or 200,
            drop_last=False,
        )
        return sampler.generate_batches()

    return Attempt(run=run, read=lambda batches: _of_sequences([pack for batch in batches for pack in batch]))


def megatron_bridge(task: Task) -> Attempt:
    algorithms = import_alone("megatron.bridge.data.packing.algorithms")

    def run() -> list[list[int]]:
        histogram = np.bincount(task.lengths).tolist()
        packs, _ = algorithms.create_packing_strategy(histogram, task.pack_length, "first_fit_decreasing")
        return packs

    return Attempt(run=run, read=_of_lengths)


def llama_factory(task: Task, *, group: int | None) -> Attempt:
    processor = import_alone("llamafactory.data.processor.processor_utils")
    lengths = task.lengths.tolist()
    step = group or len(lengths)

    def run() -> list[list[int]]:
        packs: list[list[int]] = []
        for first in range(0, len(lengths), step):
            packs += processor.greedy_knapsack(lengths[first : first + step], task.pack_length)
        return packs

    return Attempt(run=run, read=_of_lengths)


def ms_swift(task: Task) -> Attempt:
    packing = import_alone("swift.dataset.packing")
    lengths = task.lengths.tolist()

    def run() -> "SimpleQueue[Any]":
        queue: SimpleQueue[Any] = SimpleQueue()
        packing.PackingDataset.create_packed_idx(0, 0, lengths, queue, task.pack_length, "binpack")
        return queue

    def read(queue: "SimpleQueue[Any]") -> Packed:
        packs = []
        while not queue.empty():
            packs += [[sequence for sequence, _ in found] for found in queue.get()[1]]
        return _of_sequences(packs)

    return Attempt(run=run, read=read)


def olmo_core(task: Task) -> Attempt:
    """Calls its packer with the begin and end of each document in the stream of tokens."""
    utilities = import_alone("olmo_core.data.utils")
    ends = np.cumsum(task.lengths).astype(np.uint64)
    begins = ends - task.lengths.astype(np.uint64)
    documents = np.stack([begins, ends], axis=1)

    def read(found: tuple[list[list[int]], np.ndarray, int]) -> Packed:
        packs, by_length, _ = found
        packed = _of_sequences(packs)
        sequences = np.searchsorted(begins, by_length[packed.members, 0])
        return Packed(members=sequences, sizes=packed.sizes, holds="sequences")

    return Attempt(run=lambda: utilities.InstancePacker(task.pack_length).pack_documents(documents), read=read)


def grain(task: Task, *, bins: int) -> Attempt:
    """Packs with `bins` open packs; each pack is discarded after its sequences are recorded."""
    import grain as package
    from grain.experimental import BestFitPackIterDataset

    source = _AllTokensEqual(task.lengths)

    def run() -> list[list[int]]:
        packs = BestFitPackIterDataset(
            package.MapDataset.source(source).to_iter_dataset(),
            length_struct={"tokens": task.pack_length},
            num_packing_bins=bins,
            max_sequences_per_bin=task.max_sequences_per_pack,
        )
        return [_first_tokens(found["tokens"], found["tokens_positions"]) for found in packs]

    return Attempt(run=run, read=_of_sequences)


class _AllTokensEqual:
    """A data source whose sequence i consists of tokens i + 1; 0 is padding."""

    def __init__(self, lengths: np.ndarray) -> None:
        self._lengths = lengths

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, sequence: int) -> dict[str, np.ndarray]:
        return {"tokens": np.full(self._lengths[sequence], sequence + 1, dtype=np.int32)}


def _first_tokens(tokens: np.ndarray, positions: np.ndarray) -> list[int]:
    return [sequence - 1 for sequence in tokens[(positions == 0) & (tokens != 0)].tolist()]


def torchtune(task: Task) -> Attempt:
    packed_module = import_alone("torchtune.datasets._packed", empty=("torchtune.data",))
    samples = [[sequence + 1] * length for sequence, length in enumerate(task.lengths.tolist())]
    source = [{"tokens": tokens, "labels": tokens} for tokens in samples]

    def read(dataset: Any) -> Packed:
        return _of_sequences([list(_distinct(found["tokens"].numpy())) for found in dataset.packs])

    return Attempt(run=lambda: packed_module.PackedDataset(source, max_seq_len=task.pack_length), read=read)


def _distinct(tokens: np.ndarray) -> Iterator[int]:
    """Returns the sequences that are concatenated in a row of tokens."""
    changes = np.flatnonzero(np.diff(tokens, prepend=0))
    return (int(token) - 1 for token in tokens[changes] if token)


def binpacking(task: Task) -> Attempt:
    from binpacking import to_constant_volume

    items = list(enumerate(task.lengths.tolist()))

    def read(packs: list[list[tuple[int, int]]]) -> Packed:
        return _of_sequences([[sequence for sequence, _ in found] for found in packs])

    return Attempt(run=lambda: to_constant_volume(items, task.pack_length, weight_pos=1), read=read)


def prtpy(task: Task) -> Attempt:
    import prtpy as package

    items = dict(enumerate(task.lengths.tolist()))
    first_fit: Callable[..., Any] = package.packing.first_fit_decreasing
    return Attempt(
        run=lambda: package.pack(algorithm=first_fit, binsize=task.pack_length, items=items), read=_of_sequences
    )
