"""torchtitan's adapter over real processes and distributed checkpoints.

torchtitan pins an older datasets, so these tests run in an environment of its own: `scripts/test_torchtitan`.
"""

import os
import pickle
import signal
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from forked_ranks import RanksFailed, run_ranks
from host_trainers import PACK_LENGTH, PACKS_PER_STEP, own_documents, own_loader

pytest.importorskip("torchtitan", reason="torchtitan needs an environment of its own: scripts/test_torchtitan")

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
        tokenizer=None,
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
