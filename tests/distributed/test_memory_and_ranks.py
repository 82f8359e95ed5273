"""Running out of memory is explained, and eight ranks learn what one learns."""

from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import run_ranks
from tiny_training import changed, never, numbered_lines, prepare_run

from evenpack.engine.config import RunConfig
from evenpack.engine.engine import TrainingEngine
from evenpack.engine.reporting.metrics import read_metrics
from evenpack.engine.train import TrainOutcome, train_in
from evenpack.engine.world.distributed import World
from evenpack.errors import RunError


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return prepare_run(tmp_path_factory.mktemp("ranks"), {"lines": numbered_lines()}, packs_per_step=16, steps=3)


def train_without_memory(world: World, config: RunConfig) -> str:
    """Returns the error of a run whose first step runs out of memory."""

    def no_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore about the allocator")

    TrainingEngine.train_step = no_memory  # type: ignore[assignment,method-assign]  # in this process alone
    try:
        train_in(world, config, stop_requested=never)
    except RunError as error:
        return str(error)
    raise AssertionError("the run has trained")


def test_a_run_without_memory_ends_with_what_to_change(config: RunConfig) -> None:
    (message,) = run_ranks(train_without_memory, 1, config)
    first, remedy = message.splitlines()
    assert first.endswith("has too little memory for this step: CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert remedy.startswith("Take fewer than 2 training.packs_per_micro_batch (`evenpack plan` computes how many fit)")
    assert "model.activation_checkpointing=true" in remedy


def train_as_told(world: World, config: RunConfig) -> TrainOutcome:
    return train_in(world, config, stop_requested=never)


def losses_on(ranks: int, config: RunConfig, folder: Path) -> list[list[float]]:
    settings = changed(config, run={"output_dir": folder}, data={"prepared_dir": config.prepared_dir})
    run_ranks(train_as_told, ranks, settings)
    return [[record["loss"], record["gradient_norm"]] for record in read_metrics(folder / "metrics.jsonl")]


@pytest.mark.slow
def test_eight_ranks_learn_what_one_learns(config: RunConfig, tmp_path: Path) -> None:
    one, eight = (losses_on(ranks, config, tmp_path / str(ranks)) for ranks in (1, 8))
    assert len(one) == 3
    assert eight == [pytest.approx(values, rel=1e-5) for values in one]
