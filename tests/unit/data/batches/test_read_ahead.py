"""Each block is read once, before it is drawn from, and nothing else is read."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from run_files import changed, prepared
from step_shapes import step_shape
from tiny_run import tiny_gpt2_run

from evenpack.data.batches import read_ahead
from evenpack.data.batches.pipeline import MicroBatchDataset, PipelineSettings
from evenpack.data.batches.read_ahead import ByteRange
from evenpack.data.order.blocked_plan import BlockedPlan
from evenpack.data.order.forms import FormedStream
from evenpack.data.prepare.prepare import prepare
from evenpack.data.prepared import PreparedData
from evenpack.data.sequences.joined import JoinedView
from evenpack.data.tokens.file import TokenFile, bin_path
from evenpack.engine.config import RunConfig
from evenpack.engine.resolving.resolve import open_run, resolve
from evenpack.engine.world.distributed import World

ONE = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def blocked(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder = tmp_path_factory.mktemp("blocked")
    shuffle = {"kind": "grid", "rows": 2, "columns": 3, "block_tokens": 3000}
    config = changed(tiny_gpt2_run(folder), data={"shuffle": shuffle, "prepared_dir": folder / "shuffled"})
    prepare(config.data, config.prepared_dir)
    return config


def dataset_of(config: RunConfig) -> MicroBatchDataset:
    prepared = PreparedData.open(config.prepared_dir, config.data)
    settings = PipelineSettings(
        seed=1,
        objective=resolve(config, prepared).objective,
        shape=step_shape(items_per_step=8, items_per_micro_batch=8),
        ranks=1,
        rank=0,
        loader_workers=0,
        pin_memory=False,
    )
    return MicroBatchDataset(prepared, settings)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[ByteRange]:
    """Returns what is requested from here on, and reads nothing of it."""
    wanted: list[ByteRange] = []
    monkeypatch.setattr(read_ahead.ReadAhead, "_ask", lambda _, one: wanted.append(one))
    return wanted


def were_asked_for(asked: list[ByteRange], file: TokenFile, sequence_ids: np.ndarray) -> bool:
    """Returns whether the tokens of each sequence, of two bytes, are in one of the ranges."""
    starts, lengths = file.spans(sequence_ids)
    ranges = [one[1:] for one in asked if one[0] == bin_path(file.prefix)]
    places = 2 * np.stack([starts, starts + lengths])
    return all(any(a <= start and stop <= b for a, b in ranges) for start, stop in places.T.tolist())


def test_each_block_is_requested_once_an_epoch_before_the_step_that_needs_it(
    blocked: RunConfig, asked: list[ByteRange]
) -> None:
    dataset = dataset_of(blocked)
    (source,) = dataset.planner.sources
    assert isinstance(source.plan, BlockedPlan)
    steps = source.plan.packs // 8
    for step in range(steps):
        dataset[step]
        ids = np.concatenate([dataset.planner.plan(one).packs.sequence_ids for one in (step, step + 1)])
        assert were_asked_for(asked, source.view.token_file, ids)
        assert len(asked) <= step * 8 * source.plan.blocks.count // source.plan.packs + 4, "no more than the next block"
    assert source.plan.blocks.count > 4
    assert len(set(asked)) == source.plan.blocks.count
    assert len(asked) <= source.plan.blocks.count + 1, "the next epoch begins with a block that was read before"
    files = {path for path, _, _ in asked}
    assert [path.name for path in files] == ["shuffled.bin"]
    ordered = sorted({one[1:] for one in asked})
    assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(ordered)), "no gap, no overlap"


def test_blocks_of_each_form_are_requested_where_packs_change_theirs(
    blocked: RunConfig, asked: list[ByteRange]
) -> None:
    longer = {"data.pack_length": 2 * blocked.data.pack_length, "training.packs_per_step": 8}
    config = prepared(changed(blocked, stages=[{"step": 3, **longer}]))
    part = open_run(config).parts[1]
    dataset = MicroBatchDataset(part.prepared, part.pipeline_settings(ONE))
    (source,) = dataset.planner.sources
    assert isinstance(source.plan, FormedStream)
    assert isinstance(source.view, JoinedView)
    seen: set[str] = set()
    for step in range(2, 2 + source.plan.form.rest // 16 + 4):
        dataset.arrays(dataset.planner.micro_batches.before(step))
        ids = dataset.planner.plan(step).packs.sequence_ids
        for view, first in ((source.view.before, 0), (source.view.after, source.view.before.count)):
            own = ids[(ids >= first) & (ids < first + view.count)] - first
            assert were_asked_for(asked, view.token_file, own)
            seen |= {str(view.token_file.prefix)} if len(own) else set()
    assert len(seen) == 2


def test_the_thread_reads_the_requested_range_to_the_byte(
    blocked: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_ahead, "_READ_BYTES", 100)
    path = tmp_path / "data"
    path.write_bytes(bytes(range(256)) * 4)
    seen = bytearray()
    preadv = read_ahead.os.preadv

    def spy(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        read = preadv(descriptor, buffers, offset)
        seen.extend(buffers[0][:read])
        return read

    monkeypatch.setattr(read_ahead.os, "preadv", spy)
    read_ahead._read(path, 10, 333, bytearray(100))
    assert bytes(seen) == path.read_bytes()[10:333]


def test_batches_are_the_same_with_read_ahead_and_without(blocked: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = dataset_of(blocked)
    with_it = [dataset[step] for step in range(6)]
    assert dataset.read_ahead._thread is not None
    monkeypatch.setattr(read_ahead.ReadAhead, "follow", lambda *_: None)
    without = dataset_of(blocked)
    for step in range(6):
        assert without[step].tokens.equal(with_it[step].tokens)
