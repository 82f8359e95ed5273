"""What a run says that it is doing: each batch of an evaluation is progress, as each micro-batch of a step is."""

from pathlib import Path

from tiny_training import never

from evenpack.engine.activity import Activity
from evenpack.engine.config import RunConfig
from evenpack.engine.train import train_in
from evenpack.engine.world.distributed import World
from evenpack.testing import prepared, run_config, run_ranks, run_values, text_sources


def said_by(world: World, config: RunConfig) -> list[tuple[Activity, int]]:
    said: list[tuple[Activity, int]] = []
    train_in(world, config, stop_requested=never, on_activity=lambda activity, step: said.append((activity, step)))
    return said


def test_each_batch_of_an_evaluation_is_progress(tmp_path: Path) -> None:
    texts = {"lines": [f"{number} {'pack ' * (number % 11)}{number * number}" for number in range(80)]}
    data = {"sources": text_sources(tmp_path, texts), "validation_fraction": 0.4}
    training = {"steps": 2, "evaluate_every_steps": 2, "evaluation_packs": 6, "checkpoint_every_steps": 2}
    config = prepared(run_config(run_values("gpt2", tmp_path, data=data, training=training)))
    (said,) = run_ranks(said_by, 1, config)
    batches = 6 // config.training.items_per_micro_batch
    assert batches > 1
    assert said.count(("evaluating", 2)) == 1 + batches
    assert said.index(("evaluating", 2)) > said.index(("summing over the ranks", 2))
    assert said[-1] == ("saving a checkpoint", 2)
