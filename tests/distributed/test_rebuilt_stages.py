"""A run whose packs, sequences or rotary positions change is the same run wherever it is killed, on any ranks."""

import os
import signal
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from forked_ranks import RanksFailed, run_ranks
from run_files import prepared, run_config, run_values, text_sources
from tiny_training import are_equal, beside, changed, exact, never, numbered_lines, records, refusal, saved_everything

from evenpack.engine import train
from evenpack.engine.config import RunConfig
from evenpack.engine.resolving.resolve import open_run
from evenpack.engine.where import open_where
from evenpack.engine.world.distributed import World

STEPS = 7
STAGES: list[dict[str, Any]] = [
    {"step": 2, "data.sources.words.weight": 2},
    {
        "step": 4,
        "data.pack_length": 64,
        "data.recipe.max_sequence_length": 64,
        "training.packs_per_step": 4,
        "training.packs_per_micro_batch": 1,
    },
    {"step": 5, "training.packs_per_step": 8, "optimizer.learning_rate": 1e-3},
    {"step": 6, "model.rotary_base": 50_000.0},
]
"""Packs and sequences twice as long from the border after step 3 on, and other rotary positions after step 5."""
KILLS = ("step 3", "border 1", "step 4", "step 5", "border 2", "step 6")
"""One step before, at and after each border, where the kill comes between the save and what is built next."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder = tmp_path_factory.mktemp("rebuilt")
    texts = {
        "lines": [f"{line} {line[::-1]}" for line in numbered_lines(50)],
        "words": [f"word {number * 7919}" for number in range(60)],
    }
    values = run_values(
        "gpt2",
        folder,
        data={"sources": text_sources(folder, texts), "validation_fraction": 0.1},
        model={"dropout": 0.1, "positions": "rotary"},
        training={"steps": STEPS, "keep_checkpoints": STEPS, "evaluate_every_steps": 3},
        optimizer={"epsilon": 1e-3},
    )
    return prepared(run_config({**values, "stages": STAGES}))


def go_on(world: World, config: RunConfig) -> None:
    train.train_in(world, config, stop_requested=never)


def train_until_killed(world: World, config: RunConfig, place: str) -> None:
    """Trains until this process kills itself as it ends a step, or begins what follows a border."""
    kind, number = place.split()
    counts = Counter[str]()
    find_start = train.find_start

    def count(counted: str, then: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*arguments: Any) -> Any:
            counts[counted] += 1
            if counted == kind and counts[counted] == int(number) + (kind == "border"):
                os.kill(os.getpid(), signal.SIGKILL)
            return then(*arguments)

        return counting

    train.find_start = count("border", find_start)
    train.train_in(world, config, stop_requested=count("step", never))


def killed(config: RunConfig, ranks: int, place: str) -> None:
    with pytest.raises(RanksFailed, match="exited without an error message"):
        run_ranks(train_until_killed, ranks, config, place)


@pytest.fixture(scope="module")
def whole(config: RunConfig) -> RunConfig:
    run = beside(config, "whole")
    run_ranks(go_on, 2, run)
    return run


@pytest.mark.slow
@pytest.mark.parametrize("place", KILLS)
def test_a_run_killed_around_a_border_is_the_one_that_was_not(whole: RunConfig, place: str):
    run = beside(whole, f"killed_{place.replace(' ', '_')}")
    killed(run, 2, place)
    done = records(run)[-1]["step"] if (run.run.output_dir / "metrics.jsonl").exists() else 0
    assert done == {"step 3": 2, "border 1": 3, "step 4": 3, "step 5": 4, "border 2": 5, "step 6": 5}[place]
    run_ranks(go_on, 2, run)
    assert exact(run) == exact(whole)
    assert are_equal(saved_everything(run, STEPS), saved_everything(whole, STEPS))


@pytest.mark.slow
def test_what_the_ranks_trained_on_is_what_where_returns(whole: RunConfig):
    run, where, resolved = whole, open_where(whole), open_run(whole)
    seen: dict[str, Counter[tuple[int, int, int]]] = {"lines": Counter(), "words": Counter()}
    for record in records(run):
        content = where.step(record["step"])
        assert record["order_hash"] == content.order_hash
        for one in content.sequences:
            for part in one.parts:
                seen[one.source][part.document, part.start, record["step"]] += part.tokens
    for source, visits in seen.items():
        documents = {document for document, _, _ in visits}
        found = Counter[tuple[int, int, int]]()
        for one in documents:
            for visit in where.document(one, source).visits:
                found[one, visit.start, visit.step] += visit.tokens
        assert found == visits
    epochs = [one["source_epochs"] for one in records(run)]
    assert epochs == [resolved.epochs(step + 1) for step in range(STEPS)]
    assert all(epochs[2][name] % 1 for name in epochs[2]), "what an epoch has left goes on in step 4"
    goes_on = [
        [resolved.order.drawn_before(index, step) < form.then for index, form in enumerate(resolved.forms[1].values())]
        for step in (4, 5, STEPS)
    ]
    assert goes_on == [[True, True], [True, False], [True, False]], "that of words ends in step 5"


@pytest.mark.slow
def test_other_ranks_go_on_over_a_border(config: RunConfig):
    undropped = changed(config, model={"dropout": 0.0})
    expected, run = beside(undropped, "one"), beside(undropped, "two")
    run_ranks(go_on, 1, expected)
    killed(run, 1, "border 1")
    run_ranks(go_on, 2, changed(run, deepspeed={"zero_stage": 2}))
    for one, other in zip(records(expected), records(run), strict=True):
        assert one["order_hash"] == other["order_hash"]
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)


def test_what_has_begun_stays_and_what_comes_may_change(config: RunConfig):
    run_ranks(go_on_otherwise, 1, beside(config, "changed"))


def go_on_otherwise(world: World, config: RunConfig) -> None:
    begun = changed(config, training={"stop_after_steps": 4}, stages=STAGES[:2])
    train.train_in(world, begun, stop_requested=never)
    shorter = [STAGES[0], {**STAGES[1], "data.pack_length": 96, "data.recipe.max_sequence_length": 96}]
    assert "step 4 would be the first that differs" in refusal(world, prepared(changed(config, stages=shorter)))
    assert "step 4 would be the first that differs" in refusal(world, changed(config, stages=STAGES[:1]))
    again = [*STAGES[:2], {"step": 6, "restart": True, "data.pack_length": 32, "data.recipe.max_sequence_length": 32}]
    train.train_in(world, changed(config, stages=again), stop_requested=never)
    assert [one["step"] for one in records(config) if "left_out" in one] == [6]
