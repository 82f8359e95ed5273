"""Batches of a run's steps: skipped ones are planned and not read, and sizes grow alike everywhere."""

import pickle
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from evenpack.data.batches import capacity
from evenpack.data.batches.pipeline import MicroBatchDataset, SkippedStep, StepBatches, training_batches
from evenpack.data.order.skipped_steps import SkippedSteps
from evenpack.engine.resolving.resolve import ResolvedRun, open_run
from evenpack.engine.world.distributed import World
from evenpack.testing import prepared, run_config, run_values, text_sources


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ResolvedRun:
    folder = tmp_path_factory.mktemp("batches")
    sources = text_sources(folder, {"lines": [f"{number} {'pack ' * (number % 7)}" for number in range(40)]})
    return open_run(prepared(run_config(run_values("gpt2", folder, data={"sources": sources}))))


def drawn(run: ResolvedRun, skipped: SkippedSteps, *, start: int) -> Iterator[StepBatches | SkippedStep]:
    world = World(rank=1, size=2, local_rank=1, device=torch.device("cpu"))
    settings = replace(run.pipeline_settings(world), planned_steps=7)
    return training_batches(run.prepared, settings, start_step=start, stop_step=7, skipped=skipped)


@pytest.mark.parametrize("start", [0, 3, 6])
def test_of_skipped_steps_nothing_is_read_and_all_is_counted(
    run: ResolvedRun, monkeypatch: pytest.MonkeyPatch, start: int
):
    plain = list(drawn(run, SkippedSteps.of([]), start=start))
    read: list[int] = []
    get = MicroBatchDataset.__getitem__
    monkeypatch.setattr(MicroBatchDataset, "__getitem__", lambda self, index: read.append(index) or get(self, index))
    found = list(drawn(run, SkippedSteps.of([(3, 5), 7]), start=start))
    assert [one.step for one in found] == list(range(start, 7))
    assert [one.step + 1 for one in found if isinstance(one, SkippedStep)] == [
        step for step in (3, 4, 5, 7) if step > start
    ]
    assert read == [2 * step + index for step in (0, 1, 5) if step >= start for index in (0, 1)]
    for one, whole in zip(found, plain, strict=True):
        assert one.counts == whole.counts
        if isinstance(one, StepBatches):
            hashes = [[batch.order_hash for batch in step.micro_batches] for step in (one, whole)]
            assert hashes[0] == hashes[1]


def test_sizes_grow_alike_on_each_rank_and_in_each_loader(run: ResolvedRun, monkeypatch: pytest.MonkeyPatch):
    """A loader's process gets a copy of the dataset, which goes on with the capacity that this has."""
    world = World(rank=0, size=2, local_rank=0, device=torch.device("cpu"))
    settings = replace(run.pipeline_settings(world), planned_steps=40)
    per_step = settings.micro_batches
    whole = MicroBatchDataset(run.prepared, replace(settings, planned_steps=None))
    monkeypatch.setattr(capacity, "_ITEMS_AT_ONCE", 2 * run.shape.items_per_step)
    datasets = [MicroBatchDataset(run.prepared, replace(settings, rank=rank), start_step=5) for rank in (0, 1)]
    datasets.append(pickle.loads(pickle.dumps(datasets[0])))
    assert datasets[2].collator.capacity == datasets[0].collator.capacity
    rooms = []
    for index in range(5 * per_step, 40 * per_step):
        batches = [dataset[index] for dataset in datasets]
        assert len({len(batch.cu_seqlens) for batch in batches}) == 1
        assert torch.equal(batches[0].tokens, batches[2].tokens)
        roomy = whole[index]
        assert batches[0].order_hash == roomy.order_hash
        assert batches[0].cu_seqlens.unique().tolist() == roomy.cu_seqlens.unique().tolist()
        rooms.append(len(batches[0].cu_seqlens) - 1)
    assert rooms == sorted(rooms)
    assert rooms[0] < rooms[-1] <= len(roomy.cu_seqlens) - 1
