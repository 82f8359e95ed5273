"""torchtitan's data loader on packs: with torchtitan where it is installed, else over a base class of the same form.

torchtitan pins an older datasets, so it is installed in an environment of its own (docs/adapters.md).
"""

import importlib.util
import itertools
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from host_trainers import PACK_LENGTH, PACKS_PER_STEP, own_documents, own_loader

import evenpack
from evenpack.adapters.first_step import require_whole_step
from evenpack.adapters.huggingface import segment_starts

HAS_TORCHTITAN = importlib.util.find_spec("torchtitan") is not None
Row = tuple[int, ...]


@pytest.fixture
def kind(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns the class of our data loader over the documents of these tests."""
    if not HAS_TORCHTITAN:
        for name in ("torchtitan", "torchtitan.components", "torchtitan.components.dataloader"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        sys.modules["torchtitan.components.dataloader"].BaseDataLoader = Base  # type: ignore[attr-defined]
    monkeypatch.delitem(sys.modules, "evenpack.adapters.torchtitan", raising=False)
    from evenpack.adapters.torchtitan import PackDataLoader

    class OwnDataLoader(PackDataLoader):
        @dataclass(kw_only=True, slots=True)
        class Config(PackDataLoader.Config):
            pass

        def documents(self, config: Any) -> Any:
            return own_documents()

    return OwnDataLoader


class Base:
    """What torchtitan's `BaseDataLoader` has."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        dataset: str = ""
        dataset_path: str | None = None


def built(kind: Any, rank: int, ranks: int, *, local_batch_size: int = 2, **settings: Any) -> Any:
    """Returns a data loader as torchtitan's Trainer builds it."""
    given = {"dp_world_size": ranks, "dp_rank": rank, "tokenizer": None, "seq_len": PACK_LENGTH}
    config = kind.Config(**{"packs_per_step": PACKS_PER_STEP, "seed": 3, **settings})
    runtime = {**given, "local_batch_size": local_batch_size, "snapshot_every_n_steps": PACKS_PER_STEP}
    return config.build(**runtime) if HAS_TORCHTITAN else kind(config, **runtime)


def read_steps(loaders: list[Any], steps: int) -> list[list[Row]]:
    """Returns the rows of tokens that all ranks read in each step, sorted."""
    iterators = [iter(loader) for loader in loaders]
    found = []
    for _ in range(steps):
        rows: list[Row] = []
        for loader, batches in zip(loaders, iterators, strict=True):
            for _ in range(loader.loader.micro_batches):
                rows += map(tuple, next(batches)[0]["input"].tolist())
        found.append(sorted(rows))
    return found


def test_batches_have_packs_with_shifted_labels_and_boundaries(kind: Any) -> None:
    inputs, labels = next(iter(built(kind, 0, 2, local_batch_size=4)))
    batch = own_loader(0, 2, micro_batches=2, balances_each_micro_batch=True)[0]
    assert inputs["input"].shape == inputs["positions"].shape == labels.shape == (4, PACK_LENGTH)
    assert inputs["input"].flatten().tolist() == batch.tokens.tolist()
    targets = batch.targets["next_token"]
    assert torch.equal(labels.flatten() != -100, targets.weights == 1)
    predicted = labels.flatten()[:-1] != -100
    assert torch.equal(labels.flatten()[:-1][predicted], batch.tokens[1:][predicted])
    boundaries = [*(inputs["positions"].flatten() == 0).nonzero().flatten().tolist(), batch.slots]
    assert boundaries == segment_starts(batch).tolist()
    if HAS_TORCHTITAN:
        from torchtitan.models.common.attention import create_varlen_metadata_for_document

        assert create_varlen_metadata_for_document(inputs["positions"]).cu_seq_q.tolist() == boundaries


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_run_goes_on_at_another_degree_in_one_order(kind: Any, tmp_path: Path) -> None:
    whole = read_steps([built(kind, 0, 1)], 6)
    assert len({row for rows in whole for row in rows}) == 6 * PACKS_PER_STEP
    read: list[list[Row]] = []
    for ranks in (2, 1, 4):
        loaders = [built(kind, rank, ranks) for rank in range(ranks)]
        if read:
            kept = {"dataloader": loaders[0].state_dict()}
            dcp.load(kept, checkpoint_id=tmp_path / f"step_{len(read)}", no_dist=True)
            for loader in loaders:
                loader.load_state_dict(kept["dataloader"])
        read += read_steps(loaders, 2)
        states = [loader.state_dict() for loader in loaders]
        assert all(one == states[0] for one in states)
        dcp.save({"dataloader": states[0]}, checkpoint_id=tmp_path / f"step_{len(read)}", no_dist=True)
    assert read == whole


def test_the_first_step_is_checked_in_torchtitans_form_too(kind: Any) -> None:
    from evenpack.adapters.torchtitan import torchtitan_inputs

    loader = built(kind, 0, 1, local_batch_size=8)
    first, second = itertools.islice(loader, 2)
    require_whole_step(loader.loader, 0, [first, second], torchtitan_inputs)
    for spoilt, message in (
        ([second, first], "rank 0: micro-batch 0: input has other values"),
        ([first], "1 micro-batches arrived, the loader makes 2"),
        (
            [first, (second[0], second[1][:4])],
            r"micro-batch 1: is torch.int64 \[4, 32\], expected torch.int64 \[8, 32\]",
        ),
        ([first, second[0]], "expected a tuple of 2 values, found dict"),
    ):
        with pytest.raises(evenpack.ConfigError, match=message):
            require_whole_step(loader.loader, 0, spoilt, torchtitan_inputs)


def test_counts_of_packs_that_are_not_torchtitans_are_refused(kind: Any) -> None:
    with pytest.raises(evenpack.ConfigError, match=r"packs_per_step \(0\) must be training\.global_batch_size"):
        built(kind, 0, 1, packs_per_step=0)
    with pytest.raises(evenpack.ConfigError, match="a multiple of 2 ranks x local_batch_size 3"):
        built(kind, 0, 2, local_batch_size=3)
    with pytest.raises(evenpack.ConfigError, match="saves after 16 micro-batches, which are no whole steps of 32"):
        built(kind, 0, 1, packs_per_step=64)
    loader = built(kind, 0, 1)
    next(iter(loader))
    with pytest.raises(evenpack.CheckpointError, match="within a step of 8 micro-batches"):
        loader.state_dict()


def test_a_state_of_other_documents_is_refused_and_an_empty_one_is_the_start(kind: Any) -> None:
    loader = built(kind, 0, 1)
    loader.load_state_dict({})
    assert loader.loader.step == 0
    with pytest.raises(evenpack.CheckpointError, match="the state is of other data"):
        loader.load_state_dict(built(kind, 0, 1, packs_per_step=32).state_dict())
