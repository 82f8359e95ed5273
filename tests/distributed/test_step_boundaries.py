"""A run that is stopped and resumed after each step equals one that was not stopped.

Boundaries are the end of warm-up, a skipped step, an evaluation, a save, and stages: a source joins and the step
doubles; then a source retires, and micro-batches and rate become smaller. Steps are numbered from 1 here, as in a run
file and in metrics.jsonl.
"""

from typing import Any

import pytest
from forked_ranks import run_ranks
from run_files import prepared, run_config, run_values, text_sources
from tiny_training import are_equal, beside, changed, exact, never, numbered_lines, records, refusal, saved_everything

from evenpack.engine.config import RunConfig
from evenpack.engine.train import train_in
from evenpack.engine.world.distributed import World

STEPS, WARM_UP, SAVED, SKIPPED, EVALUATED, JOINED, RETIRED = 8, 2, 3, 4, 5, 6, 7
SHUFFLE = {"kind": "grid", "rows": 2, "columns": 2, "block_tokens": 250}
"""Blocks of more steps than one, so that runs are stopped within some."""
RATE, LATER_RATE = 1e-3, 1e-4


def stages(words: int) -> list[dict[str, Any]]:
    joins = {"data.sources.words.weight": words, "data.sources.later.weight": 2, "training.packs_per_step": 16}
    smaller = {"training.packs_per_step": 8, "training.packs_per_micro_batch": 1, "optimizer.learning_rate": LATER_RATE}
    return [{"step": JOINED, **joins}, {"step": RETIRED, "data.sources.lines.weight": 0, **smaller}]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """Trains a run without a stop, and beside it one that is stopped after each step, `resumed`."""
    folder = tmp_path_factory.mktemp("boundaries")
    texts = {
        "later": [f"later {number * 31}" for number in range(50)],  # which the run draws last and the file names first
        "lines": numbered_lines(120),
        "words": [f"word {number * 7919}" for number in range(90)],
    }
    sources = text_sources(folder, texts)
    sources["later"]["weight"] = 0
    values = run_values(
        "gpt2",
        folder,
        run={"output_dir": str(folder / "straight")},
        data={"sources": sources, "validation_fraction": 0.1, "shuffle": SHUFFLE},
        model={"dropout": 0.1},
        training={
            "steps": STEPS,
            "skip_steps": [SKIPPED],
            "evaluate_every_steps": EVALUATED,
            "checkpoint_every_steps": SAVED,
            "keep_checkpoints": STEPS,
            "loader_workers": 0,
        },
        optimizer={"learning_rate": RATE},
        schedule={"kind": "linear", "warmup_steps": WARM_UP, "final_fraction": 0.0},
    )
    config = prepared(run_config({**values, "stages": stages(9)}))
    run_ranks(train_all, 1, config)
    return config


def train_all(world: World, straight: RunConfig) -> None:
    train_in(world, straight, stop_requested=never)
    config = beside(straight, "resumed")
    for stop in range(1, STEPS + 1):
        # What the run file says of a step may change until that step is done.
        training = {
            "stop_after_steps": stop,
            "skip_steps": [SKIPPED] if stop >= SKIPPED else [SKIPPED + 1],
            "loader_workers": int(stop in (SKIPPED, RETIRED)),
        }
        begun = changed(config, training=training, stages=stages(9 if stop >= JOINED else 5))
        train_in(world, begun, stop_requested=never)
        if stop == SKIPPED:
            assert f"not named now: {SKIPPED}" in refusal(world, changed(config, training={"skip_steps": []}))
        if stop == JOINED:
            assert f"step {JOINED} would be the first" in refusal(world, changed(config, stages=stages(5)))


def saved(config: RunConfig) -> set[int]:
    return {int(path.name.removeprefix("step_")) for path in (config.run.output_dir / "checkpoints").glob("step_*")}


def test_each_boundary_is_at_the_step_that_the_run_file_names(straight: RunConfig):
    found = {record["step"]: record for record in records(straight)}
    assert list(found) == list(range(1, STEPS + 1))
    for step, record in found.items():
        share = min(step / WARM_UP, (STEPS - step) / (STEPS - WARM_UP))
        assert record["learning_rate"] == pytest.approx(share * (RATE if step < RETIRED else LATER_RATE))
    assert [step for step, record in found.items() if "skipped" in record] == [SKIPPED]
    assert [step for step, record in found.items() if record.get("validation")] == [EVALUATED, STEPS]
    assert saved(straight) == {SAVED, 2 * SAVED, STEPS}
    for step in found.keys() - {SKIPPED}:
        drawn = {name for name, tokens in found[step]["source_tokens"].items() if tokens}
        assert drawn == {"words"} | ({"later"} if step >= JOINED else set()) | ({"lines"} if step < RETIRED else set())


def test_a_run_resumed_at_any_step_is_the_one_that_was_not_stopped(straight: RunConfig):
    config = beside(straight, "resumed")
    assert exact(config) == exact(straight)
    assert saved(config) == set(range(1, STEPS + 1))
    assert are_equal(saved_everything(config, STEPS), saved_everything(straight, STEPS))
