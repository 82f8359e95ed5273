"""Batches of a run's steps: skipped ones are planned and not read."""

from collections.abc import Iterator

import pytest
import torch
from run_files import prepared, run_config, run_values, text_sources

from evenpack.data.batches.pipeline import MicroBatchDataset, SkippedStep, StepBatches, training_batches
from evenpack.data.order.skipped_steps import SkippedSteps
from evenpack.engine.resolving.resolve import ResolvedRun, open_run
from evenpack.engine.world.distributed import World


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ResolvedRun:
    folder = tmp_path_factory.mktemp("batches")
    sources = text_sources(folder, {"lines": [f"{number} {'pack ' * (number % 7)}" for number in range(40)]})
    return open_run(prepared(run_config(run_values("gpt2", folder, data={"sources": sources}))))


def drawn(run: ResolvedRun, skipped: SkippedSteps, *, start: int) -> Iterator[StepBatches | SkippedStep]:
    world = World(rank=1, size=2, local_rank=1, device=torch.device("cpu"))
    return training_batches(run.prepared, run.pipeline_settings(world), start_step=start, stop_step=7, skipped=skipped)


@pytest.mark.parametrize("start", [0, 3, 6])
def test_of_skipped_steps_nothing_is_read_and_all_is_counted(
    run: ResolvedRun, monkeypatch: pytest.MonkeyPatch, start: int
):
    plain = list(drawn(run, SkippedSteps.named([]), start=start))
    read: list[int] = []
    get = MicroBatchDataset.__getitem__
    monkeypatch.setattr(MicroBatchDataset, "__getitem__", lambda self, index: read.append(index) or get(self, index))
    found = list(drawn(run, SkippedSteps.named([(3, 5), 7]), start=start))
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
