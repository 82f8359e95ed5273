"""A run that is resumed before, at and after each boundary equals one that was not stopped.

Boundaries are the end of warm-up, a skipped step, other weights of the mixture, an evaluation and a save. Steps are
numbered from 1 here, as in a run file and in metrics.jsonl.
"""

from typing import Any

import pytest
import torch
from forked_ranks import run_ranks
from run_files import prepared, run_config, run_values, text_sources
from tiny_training import changed, never, numbered_lines, records, refusal, saved_everything

from evenpack.engine.config import RunConfig
from evenpack.engine.train import train_in
from evenpack.engine.world.distributed import World

STEPS, WARM_UP, SAVED, SKIPPED, EVALUATED, REWEIGHTED = 8, 2, 3, 4, 5, 6
STOPS = range(1, STEPS)
"""Steps done when a run is stopped: every number, so one before, at and after each boundary."""
RATE = 1e-3
EXACT = (
    *("step", "loss", "learning_rate", "gradient_norm", "tokens", "samples", "source_tokens", "source_epochs"),
    *("order_hash", "validation", "skipped"),
)


def stages(words: int) -> list[dict[str, Any]]:
    return [{"step": REWEIGHTED, "data.sources.words.weight": words}]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """Trains a run without a stop, and beside it one for each number of steps after which it is stopped and resumed."""
    folder = tmp_path_factory.mktemp("boundaries")
    texts = {"lines": numbered_lines(120), "words": [f"word {number * 7919}" for number in range(90)]}
    values = run_values(
        "gpt2",
        folder,
        run={"output_dir": str(folder / "straight")},
        data={"sources": text_sources(folder, texts), "validation_fraction": 0.1},
        training={
            "steps": STEPS,
            "skip_steps": [SKIPPED],
            "evaluate_every_steps": EVALUATED,
            "checkpoint_every_steps": SAVED,
            "keep_checkpoints": STEPS,
        },
        optimizer={"learning_rate": RATE},
        schedule={"kind": "linear", "warmup_steps": WARM_UP, "final_fraction": 0.0},
    )
    config = prepared(run_config({**values, "stages": stages(9)}))
    run_ranks(train_all, 1, config)
    return config


def resumed(straight: RunConfig, stop: int) -> RunConfig:
    return changed(straight, run={"output_dir": straight.run.output_dir.with_name(f"resumed_{stop}")})


def train_all(world: World, straight: RunConfig) -> None:
    train_in(world, straight, stop_requested=never)
    for stop in STOPS:
        config = resumed(straight, stop)
        # What the run file says of a step may change until that step is done.
        begun = changed(
            config,
            training={"stop_after_steps": stop, "skip_steps": [SKIPPED] if stop >= SKIPPED else [SKIPPED + 1]},
            stages=stages(9 if stop >= REWEIGHTED else 5),
        )
        train_in(world, begun, stop_requested=never)
        if stop == SKIPPED:
            assert f"not named now: {SKIPPED}" in refusal(world, changed(config, training={"skip_steps": []}))
        if stop == REWEIGHTED:
            assert f"step {REWEIGHTED} would be the first" in refusal(world, changed(config, stages=stages(5)))
        train_in(world, config, stop_requested=never)


def saved(config: RunConfig) -> set[int]:
    return {int(path.name.removeprefix("step_")) for path in (config.run.output_dir / "checkpoints").glob("step_*")}


def test_each_boundary_is_at_the_step_that_the_run_file_names(straight: RunConfig):
    found = {record["step"]: record for record in records(straight)}
    assert list(found) == list(range(1, STEPS + 1))
    rates = [RATE * min(step / WARM_UP, (STEPS - step) / (STEPS - WARM_UP)) for step in found]
    assert [record["learning_rate"] for record in found.values()] == pytest.approx(rates)
    assert [step for step, record in found.items() if "skipped" in record] == [SKIPPED]
    assert [step for step, record in found.items() if record.get("validation")] == [EVALUATED, STEPS]
    assert saved(straight) == {SAVED, 2 * SAVED, STEPS}
    trained = {step: record for step, record in found.items() if step != SKIPPED}
    words = {step: record["source_tokens"]["words"] / record["tokens"] for step, record in trained.items()}
    later = [share for step, share in words.items() if step >= REWEIGHTED]
    assert max(share for step, share in words.items() if step < REWEIGHTED) < min(later)


@pytest.mark.parametrize("stop", STOPS)
def test_a_run_resumed_at_any_step_is_the_one_that_was_not_stopped(straight: RunConfig, stop: int):
    config = resumed(straight, stop)
    whole, again = ([[one.get(name) for name in EXACT] for one in records(run)] for run in (straight, config))
    assert again == whole
    assert saved(config) == saved(straight) | {stop}
    last, last_again = (saved_everything(run, STEPS) for run in (straight, config))
    assert last_again.keys() == last.keys()
    assert all(torch.equal(tensor, last_again[place]) for place, tensor in last.items())
