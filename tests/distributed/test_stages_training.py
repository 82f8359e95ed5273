"""A run with stages is the same run however it is stopped and resumed around their borders, on any number of ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import run_ranks
from run_files import prepared, run_config, run_values, text_sources
from slow_cases import slow_but
from tiny_training import changed, never, numbered_lines, records, refusal, saved_everything

from evenpack.engine.config import RunConfig
from evenpack.engine.train import train_in
from evenpack.engine.where import open_where
from evenpack.engine.world.distributed import World

STEPS = 6
STAGES: list[dict[str, Any]] = [
    {"step": 3, "data.sources.later.weight": 2, "training.packs_per_step": 16},
    {
        "step": 5,
        "data.sources.lines.weight": 0,
        "training.packs_per_step": 8,
        "training.packs_per_micro_batch": 1,
        "optimizer.learning_rate": 1e-4,
    },
]
"""A source joins and the step doubles; a source retires, and micro-batches and rate become smaller."""
STOPS = (1, 2, 3, 4, 5)
"""Steps done when a run is stopped: before, at and after each border."""
EXACT = ("step", "loss", "learning_rate", "gradient_norm", "tokens", "samples", "source_tokens", "order_hash")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder = tmp_path_factory.mktemp("stages")
    texts = {
        "later": [f"later {number * 31}" for number in range(50)],  # which the run draws last and the file names first
        "lines": numbered_lines(70),
        "words": [f"word {number * 7919}" for number in range(60)],
    }
    sources = text_sources(folder, texts)
    sources["later"]["weight"] = 0
    values = run_values(
        "gpt2",
        folder,
        data={"sources": sources},
        model={"dropout": 0.1},
        training={"steps": STEPS, "keep_checkpoints": STEPS, "loader_workers": 0},
        optimizer={"learning_rate": 3e-3, "epsilon": 1e-3},
    )
    return prepared(run_config({**values, "stages": STAGES}))


def named(config: RunConfig, name: str, **training: Any) -> RunConfig:
    return changed(config, run={"output_dir": config.run.output_dir.with_name(name)}, training=training)


def train_all(world: World, config: RunConfig) -> None:
    train_in(world, named(config, f"whole_{world.size}"), stop_requested=never)
    for stop in STOPS:
        run = named(config, f"stopped_{world.size}_{stop}")
        # Stages that have not begun may still be others.
        begun = changed(
            run,
            training={"stop_after_steps": stop, "loader_workers": stop % 2},
            stages=[one for one in STAGES if one["step"] <= stop],
        )
        train_in(world, begun, stop_requested=never)
        train_in(world, run, stop_requested=never)
        if stop == 3:
            earlier = [{"step": 2, "data.sources.later.weight": 1}, *STAGES]
            assert "step 2 would be the first that differs" in refusal(world, changed(run, stages=earlier))


@pytest.fixture(scope="module", params=slow_but([2], [1, 2, 4]))
def trained(config: RunConfig, request: pytest.FixtureRequest) -> tuple[RunConfig, int]:
    ranks: int = request.param
    run_ranks(train_all, ranks, config)
    return config, ranks


def test_a_run_resumed_around_a_border_is_the_one_that_was_not_stopped(trained: tuple[RunConfig, int]):
    config, ranks = trained
    whole = named(config, f"whole_{ranks}")
    expected = [[one.get(name) for name in EXACT] for one in records(whole)]
    assert [one["learning_rate"] < 1e-4 for one in records(whole)] == [False] * 4 + [True] * 2
    last = saved_everything(whole, STEPS)
    for stop in STOPS:
        run = named(config, f"stopped_{ranks}_{stop}")
        assert [[one.get(name) for name in EXACT] for one in records(run)] == expected, stop
        again = saved_everything(run, STEPS)
        assert again.keys() == last.keys()
        assert all(torch.equal(tensor, again[place]) for place, tensor in last.items()), stop


def test_what_the_ranks_trained_on_is_what_where_returns(trained: tuple[RunConfig, int]):
    config, ranks = trained
    where = open_where(config)
    for record in records(named(config, f"whole_{ranks}")):
        content = where.step(record["step"])
        assert record["order_hash"] == content.order_hash
        sources = {one.source for one in content.sequences}
        assert sources == {name for name, tokens in record["source_tokens"].items() if tokens}
        assert ("later" in sources, "lines" in sources) == (record["step"] >= 3, record["step"] < 5)


def go_on(world: World, configs: list[RunConfig]) -> None:
    for config in configs:
        train_in(world, config, stop_requested=never)


def test_other_ranks_go_on_over_a_border(config: RunConfig, tmp_path: Path):
    undropped = changed(config, model={"dropout": 0.0}, run={"output_dir": tmp_path / "one"})
    run_ranks(go_on, 1, [undropped])
    begun = changed(undropped, run={"output_dir": tmp_path / "two"})
    run_ranks(go_on, 1, [changed(begun, training={"stop_after_steps": 2})])
    run_ranks(go_on, 2, [changed(begun, training={"stop_after_steps": 5}), changed(begun, deepspeed={"zero_stage": 2})])
    expected, found = records(undropped), records(begun)
    assert [one["order_hash"] for one in found] == [one["order_hash"] for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
