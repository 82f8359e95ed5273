"""A rank of many is rehearsed in one process: its packs are those of training, and its step runs without numbers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import fork_context
from run_files import changed, pair_run_values, prepared, run_config, run_values, text_sources

from evenpack.data.batches.pipeline import MicroBatchDataset, training_batches
from evenpack.engine.config import RunConfig
from evenpack.engine.memory.rehearsal import RankRehearsal, rehearse
from evenpack.engine.resolving.resolve import open_run
from evenpack.engine.world.distributed import World
from evenpack.errors import ConfigError
from evenpack.launcher.planning import rehearsal_table

RANKS, RANK = 2048, 1777


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder = tmp_path_factory.mktemp("rehearsal")
    documents = [f"{number} {'pack ' * (number % 11)}{number * number}" for number in range(600)]
    training = {"packs_per_step": 2 * RANKS, "packs_per_micro_batch": 1}
    data = {"sources": text_sources(folder, {"lines": documents})}
    return prepared(run_config(run_values("gpt2", folder, data=data, training=training)))


def rehearsed(config: RunConfig, *, rank: int, ranks: int) -> RankRehearsal:
    """Rehearses in a process of its own, which joins a group of ranks that do not exist."""
    context = fork_context()
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_rehearse, args=(there, config, rank, ranks))
    process.start()
    there.close()
    found = here.recv()
    process.join()
    assert isinstance(found, RankRehearsal), found
    return found


def _rehearse(there: Any, config: RunConfig, rank: int, ranks: int) -> None:
    try:
        there.send(rehearse(open_run(config), rank=rank, ranks=ranks))
    except BaseException as error:
        there.send(repr(error))
        raise


def test_a_rank_of_many_has_its_packs_of_training_and_makes_a_step(config: RunConfig) -> None:
    found, run = rehearsed(config, rank=RANK, ranks=RANKS), open_run(config)
    settings = run.pipeline_settings(World(rank=RANK, size=RANKS, local_rank=0, device=torch.device("cpu")))
    (step,) = training_batches(run.prepared, settings, start_step=0, stop_step=1)
    batches = step.micro_batches
    assert found.items == (1, 1)
    assert found.slots == tuple(batch.slots for batch in batches)
    assert found.tokens == sum(batch.local_counts.tokens for batch in batches)
    assert found.sequences == sum(batch.local_counts.sequences for batch in batches)
    assert found.tokens_of_the_mean_rank == batches[0].step_counts.tokens / RANKS
    planned = MicroBatchDataset(run.prepared, settings).planner.plan(0)
    cost = run.shape.cost_weights.per_squared_length * sum(batch.squared_lengths for batch in batches)
    assert found.cost_over_mean == pytest.approx(cost / (planned.costs.sum() / RANKS))
    assert found.cost_over_mean <= found.largest_cost_over_mean
    assert sum(planned.cost(rank) for rank in range(RANKS)) == pytest.approx(planned.costs.sum())
    assert found.faked_gradients == run.parameters
    assert rehearsal_table(found, "packs").row_count > 5


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_a_step_of_bert_with_all_that_reads_numbers_is_faked(tmp_path: Path, stage: int) -> None:
    sources = text_sources(
        tmp_path, {"pairs": [f"The pack {n % 7} is full. It holds {n % 5} parts." for n in range(99)]}
    )
    values = pair_run_values("bert", tmp_path, data={"sources": sources}, optimizer={"kind": "adamw"})
    config = changed(
        prepared(run_config(values)),
        training={"packs_per_step": 64, "packs_per_micro_batch": 2, "precision": "bf16_autocast", "compile": stage < 3},
        model={"dropout": 0.1, "activation_checkpointing": True},
        deepspeed={"zero_stage": stage},
    )
    found = rehearsed(config, rank=15, ranks=16)
    assert found.faked_gradients == open_run(config).parameters
    assert found.memory.phases[2].buffers == 2_000_000_000, "DeepSpeed's bucket"


@pytest.mark.parametrize(
    ("rank", "ranks", "message"),
    [(-1, RANKS, "from 0 to 2,047"), (RANKS, RANKS, "from 0 to 2,047"), (0, 7, "ranks can be 1, 2, 4, .*, 4096")],
)
def test_ranks_that_cannot_be_are_refused_before_anything_is_faked(
    config: RunConfig, rank: int, ranks: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        rehearse(open_run(config), rank=rank, ranks=ranks)
