"""Provides a small prepared GPT-2 run, for studies of time in the test's own process."""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from run_files import prepared, run_config, run_values, text_sources

from evenpack.engine.checkpoints.files import TrainState
from evenpack.engine.config import RunConfig
from evenpack.engine.resolving.resolve import ResolvedRun
from evenpack.engine.world.distributed import World, joined_world

PACK_LENGTH = 64


def tiny_gpt2_run(folder: Path) -> RunConfig:
    """Returns a run with sequences of all lengths up to a pack, and two micro-batches per step."""
    source = random.Random(4)
    documents = ["".join(source.choices("abcdefgh", k=source.randint(2, 60))) for _ in range(600)]
    values = run_values(
        "gpt2",
        folder,
        data={
            "sources": text_sources(folder, {"one": documents}),
            "recipe": {"kind": "documents", "max_sequence_length": PACK_LENGTH},
            "pack_length": PACK_LENGTH,
        },
        training={"packs_per_micro_batch": 4},
        optimizer={"learning_rate": 1e-3},
    )
    return prepared(run_config(values))


@contextmanager
def lone_world() -> Iterator[World]:
    """Yields one rank on the CPU; the environment is restored afterwards."""
    before = dict(os.environ)
    os.environ["DS_ACCELERATOR"] = "cpu"
    try:
        with joined_world() as alone:
            yield alone
    finally:
        os.environ.clear()
        os.environ.update(before)


def train_state(run: ResolvedRun, *, step: int) -> TrainState:
    """Returns the state of a checkpoint of the run, without weights."""
    return TrainState(
        step=step,
        fingerprint=run.fingerprint(step),
        world_size=1,
        zero_stage=0,
        cost_weights=run.shape.cost_weights,
        config=run.config.model_dump(mode="json"),
        reached_accuracy=None,
        samples=0,
        stages=run.past(step),
    )
