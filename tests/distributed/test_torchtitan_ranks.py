"""torchtitan's adapter over real processes and distributed checkpoints, and beside torchtitan's own text loader.

torchtitan pins an older datasets, so these tests run in an environment of its own: `scripts/test_torchtitan`.
"""

import os
import pickle
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from forked_ranks import RanksFailed, run_ranks
from host_trainers import PACK_LENGTH, PACKS_PER_STEP, own_documents, own_loader

pytest.importorskip("torchtitan", reason="torchtitan needs an environment of its own: scripts/test_torchtitan")
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.hf_datasets import DatasetConfig, text_datasets

from evenpack.adapters.torchtitan import PackDataLoader

STEPS = 6
LOCAL_BATCH_SIZE = 2
Rows = list[tuple[int, ...]]


class OwnDataLoader(PackDataLoader):
    """Packs of the documents of these tests."""

    @dataclass(kw_only=True, slots=True)
    class Config(PackDataLoader.Config):
        pass

    def documents(self, config: Any) -> Any:
        return own_documents()


def built(config: Any, rank: int, ranks: int) -> Any:
    """Returns a data loader as torchtitan's Trainer builds it, with a checkpoint after each step."""
    return config.build(
        dp_world_size=ranks,
        dp_rank=rank,
        tokenizer=Numbers(),
        seq_len=PACK_LENGTH,
        local_batch_size=LOCAL_BATCH_SIZE,
        snapshot_every_n_steps=micro_batches(ranks),
    )


def micro_batches(ranks: int) -> int:
    return PACKS_PER_STEP // (LOCAL_BATCH_SIZE * ranks)


def own_config() -> Any:
    return OwnDataLoader.Config(packs_per_step=PACKS_PER_STEP, seed=3)


def read(world: Any, folder: str, steps: int, resume: int | None, dies_in: int | None) -> dict[int, Rows]:
    """Reads steps on this rank, keeps each in a file and saves a checkpoint after it, as torchtitan does."""
    loader = built(own_config(), world.rank, world.size)
    if resume is not None:
        dcp.load({"dataloader": loader}, checkpoint_id=f"{folder}/step_{resume}")
    found: dict[int, Rows] = {}
    batches = iter(loader)
    for step in range(resume or 0, steps):
        found[step] = []
        for inputs, _ in islice(batches, micro_batches(world.size)):
            found[step] += map(tuple, inputs["input"].tolist())
            if step == dies_in:
                torch.distributed.barrier()
                os.kill(os.getpid(), signal.SIGKILL)
        Path(f"{folder}/rows_{step}_{world.rank}_of_{world.size}").write_bytes(pickle.dumps(found[step]))
        dcp.save({"dataloader": loader}, checkpoint_id=f"{folder}/step_{step + 1}")
    return found


def rows_of_plan(step: int) -> Rows:
    """Returns the packs of a step, read by the Loader alone."""
    return sorted(
        tuple(row) for batch in own_loader().batches_of(step) for row in batch.tokens.view(-1, PACK_LENGTH).tolist()
    )


@pytest.mark.parametrize("ranks", [2, 4])
def test_no_pack_is_lost_or_repeated_on_ranks(ranks: int, tmp_path: Path) -> None:
    steps = own_loader().packs // PACKS_PER_STEP
    results = run_ranks(read, ranks, str(tmp_path), steps, None, None)
    rows = [row for result in results for step in result.values() for row in step]
    assert len(set(rows)) == len(rows) == steps * PACKS_PER_STEP
    for step in range(steps):
        assert sorted(row for result in results for row in result[step]) == rows_of_plan(step)


def test_a_killed_run_goes_on_at_other_degrees_in_one_order(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed):
        run_ranks(read, 2, str(tmp_path), STEPS, None, 2)
    with pytest.raises(RanksFailed):
        run_ranks(read, 1, str(tmp_path), STEPS, 2, 4)
    run_ranks(read, 4, str(tmp_path), STEPS, 4, None)
    for step, ranks in enumerate((2, 2, 1, 1, 4, 4)):
        files = sorted(tmp_path.glob(f"rows_{step}_*"))
        assert [file.name for file in files] == [f"rows_{step}_{rank}_of_{ranks}" for rank in range(ranks)]
        assert sorted(row for file in files for row in pickle.loads(file.read_bytes())) == rows_of_plan(step)


class Numbers(BaseTokenizer):  # type: ignore[misc]  # torchtitan is not typed
    """A tokenizer of texts that consist of token ids."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return [int(token) for token in text.split()]

    def decode(self, *_: Any, **__: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        raise NotImplementedError


@pytest.fixture
def text_config(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Returns the config of torchtitan's text loader over the same documents."""
    import datasets

    texts = [" ".join(map(str, document)) for document in own_documents()]
    dataset = datasets.Dataset.from_dict({"text": texts})
    config = DatasetConfig(path="", loader=lambda path: dataset, sample_processor=lambda sample: sample["text"])
    monkeypatch.setitem(text_datasets.DATASETS, "own", config)
    return text_datasets.HuggingFaceTextDataLoader.Config(dataset="own")


def steps_of(config: Any, ranks: int, steps: int) -> list[list[list[dict[str, Any]]]]:
    """Returns the inputs of each micro-batch, by step and rank."""
    batches = [iter(built(config, rank, ranks)) for rank in range(ranks)]
    return [[[inputs for inputs, _ in islice(one, micro_batches(ranks))] for one in batches] for _ in range(steps)]


def order_of(steps: list[list[list[dict[str, Any]]]]) -> list[Rows]:
    return [sorted(tuple(row) for rank in step for one in rank for row in one["input"].tolist()) for step in steps]


def imbalance(steps: list[list[list[dict[str, Any]]]]) -> float:
    """Returns the greatest rank's squared lengths over the mean rank's, as the mean over steps."""
    ratios = []
    for step in steps:
        loads = []
        for rank in step:
            starts = np.flatnonzero(torch.cat([one["positions"].flatten() for one in rank]).numpy() == 0)
            slots = sum(one["positions"].numel() for one in rank)
            loads.append(float((np.diff(starts, append=slots) ** 2).sum()))
        ratios.append(max(loads) / np.mean(loads))
    return float(np.mean(ratios))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
def test_beside_torchtitans_own_text_loader(text_config: Any) -> None:
    own, text = (
        {ranks: steps_of(config, ranks, STEPS) for ranks in (1, 2, 4)} for config in (own_config(), text_config)
    )
    assert order_of(own[1]) == order_of(own[2]) == order_of(own[4])
    assert order_of(text[1]) != order_of(text[2])
    for ranks in (2, 4):
        assert imbalance(own[ranks]) < imbalance(text[ranks])
    # It cuts documents where rows end, so that every slot has a token; packs of whole documents leave few.
    documents = {tuple(document) for document in own_documents()}
    rows = [row for step in order_of(own[1]) for row in step]
    filled = np.mean([token != 0 for row in rows for token in row])
    assert 0.97 < filled <= 1
    begun = [row for step in order_of(text[1]) for row in step]
    assert sum(any(row[: len(document)] == document for document in documents) for row in rows) == len(rows)
    assert sum(any(row[: len(document) - 1] == document[:-1] for document in documents) for row in begun) < len(begun)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
def test_torchtitans_own_loader_refuses_another_degree(text_config: Any) -> None:
    loaders = [built(text_config, rank, 2) for rank in range(2)]
    for loader in loaders:
        next(iter(loader))
    state = {name: value for loader in loaders for name, value in loader.state_dict().items()}
    with pytest.raises(AssertionError, match="dp_degree is inconsistent"):
        built(text_config, 0, 1).load_state_dict(state)
