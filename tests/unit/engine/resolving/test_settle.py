"""Steps given in tokens become whole micro-batches, and a run does the number of steps in its plan."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_run import lone_world, tiny_gpt2_run

from evenpack.engine.config import RunConfig, TrainingSection
from evenpack.engine.reporting.metrics import METRICS, read_metrics
from evenpack.engine.resolving.data_facts import AverageItem
from evenpack.engine.resolving.resolve import open_run
from evenpack.engine.resolving.settle import items_for_tokens
from evenpack.engine.train import train_in
from evenpack.engine.where import open_where
from evenpack.errors import ConfigError
from evenpack.launcher.training import plan_training
from evenpack.studies.throughput.contenders import changed


def training(tokens_per_step: int, micro_batch: int) -> TrainingSection:
    return TrainingSection(tokens_per_step=tokens_per_step, packs_per_micro_batch=micro_batch, steps=1)


def item(tokens: Fraction) -> AverageItem:
    return AverageItem(sequences=Fraction(1), tokens=tokens, row_slots=1024)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return tiny_gpt2_run(tmp_path_factory.mktemp("run"))


def by_tokens(config: RunConfig, asked: int, **values: Any) -> RunConfig:
    return changed(config, training={"packs_per_step": None, "tokens_per_step": asked, **values})


@pytest.mark.parametrize(
    ("tokens_per_step", "per_pack", "micro_batch", "packs"),
    [
        (524_288, Fraction(1014), 8, 512),  # 517.05 packs: 512 is 1 % off and suits 64 ranks of one micro-batch
        (524_288, Fraction(1024), 8, 512),
        (5_000, Fraction(60), 2, 84),  # 83.3 packs
        (83, Fraction(1), 1, 84),  # 83 itself is divided by one rank alone
        (7, Fraction(1), 1, 7),  # neither 6 nor 8 is near
        (1_000, Fraction(100), 8, 8),  # 10 packs; nothing is nearer
    ],
)
def test_tokens_become_a_number_of_packs_that_many_ranks_divide(
    tokens_per_step: int, per_pack: Fraction, micro_batch: int, packs: int
) -> None:
    assert items_for_tokens(training(tokens_per_step, micro_batch), item(per_pack)) == packs


@given(
    asked=st.integers(1, 10**9), per_pack=st.fractions(1, 2048, max_denominator=10**6), micro_batch=st.integers(1, 64)
)
def test_packs_are_near_what_is_requested_and_whole_micro_batches(
    asked: int, per_pack: Fraction, micro_batch: int
) -> None:
    aim = asked / per_pack
    nearest = micro_batch * max(1, round(aim / micro_batch))
    section = training(asked, micro_batch)
    if abs(nearest / aim - 1) > Fraction(1, 4):
        with pytest.raises(ConfigError, match="no multiple of training"):
            items_for_tokens(section, item(per_pack))
        return
    packs = items_for_tokens(section, item(per_pack))
    assert packs % micro_batch == 0
    assert packs == nearest or abs(packs / aim - 1) <= Fraction(1, 50)


def test_less_than_a_micro_batch_is_refused_with_what_one_holds() -> None:
    with pytest.raises(ConfigError) as caught:
        items_for_tokens(training(500, 8), item(Fraction(100)))
    assert "training.tokens_per_step (500) is 5.00 packs of 100.0 tokens on average" in str(caught.value)
    assert "one micro-batch holds 800 tokens; raise tokens_per_step" in str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"packs_per_step": 8}, r"tokens_per_step \(900\) and packs_per_step \(8\) both give the size of a step"),
        ({"packing_adjustment": "fewer_accumulations"}, "tokens_per_step counts tokens, which packing does not change"),
        ({"tokens_per_step": None}, "packs_per_step is required, or tokens_per_step"),
        ({"tokens_per_step": 0}, "greater than or equal to 1"),
    ],
)
def test_a_step_is_given_once(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainingSection(**({"tokens_per_step": 900, "packs_per_micro_batch": 4, "steps": 1} | values))


def test_a_step_in_tokens_is_that_of_the_packs_that_it_comes_to(config: RunConfig) -> None:
    by_packs = open_run(config)
    asked = round(8.1 * by_packs.item.tokens)
    run = open_run(by_tokens(config, asked))
    assert run.shape == by_packs.shape
    assert run.config == by_packs.config, "a checkpoint holds packs, so that it goes on whatever it holds"
    (line,) = run.settled.adjustment
    assert f"tokens_per_step {asked}: training.packs_per_step 8 (exactly 8.10)" in line
    assert "% fewer than asked for" in line


def test_a_settled_run_has_the_steps_of_its_run_file(config: RunConfig) -> None:
    stated = changed(config, training={"packs_per_step": 32, "packing_adjustment": "fewer_accumulations"})
    settled = open_run(stated).config
    assert settled.training.packs_per_step < 32
    assert open_where(settled).step(1) == open_where(stated).step(1)


def test_a_step_of_sequences_may_be_given_in_tokens_too(config: RunConfig) -> None:
    of_sequences = {"batching": "sequences", "layout": "unpadded", "packs_per_micro_batch": None}
    run = open_run(by_tokens(config, 500, **of_sequences, sequences_per_micro_batch=2))
    assert run.item.sequences == 1
    assert abs(run.shape.items_per_step * run.item.tokens / 500 - 1) < 0.1


def test_ranks_that_get_less_than_a_micro_batch_get_the_number_of_tokens_they_take(config: RunConfig) -> None:
    run = open_run(config)
    asked = round(4 * run.item.tokens)
    with pytest.raises(ConfigError) as caught:
        plan_training(by_tokens(config, asked), ranks=2)
    message = str(caught.value)
    assert f"training.tokens_per_step ({asked}) is 4 packs and is below one micro-batch per rank" in message
    assert f"2 ranks take multiples of 8 packs, {float(8 * run.item.tokens):,.0f} tokens on average" in message


def test_a_run_by_tokens_does_the_steps_that_its_plan_shows(config: RunConfig, tmp_path: Path) -> None:
    run = changed(
        by_tokens(config, 500, steps=None, tokens=3_100, evaluate_every_steps=None, loader_workers=0),
        run={"output_dir": tmp_path},
        data={"prepared_dir": config.prepared_dir},
    )
    plan = plan_training(run, ranks=1)
    with lone_world() as world:
        train_in(world, run, stop_requested=lambda: False)
    records = read_metrics(tmp_path / METRICS)
    assert len(records) == plan.steps == -(-3_100 // plan.tokens_per_step)
    assert sum(record["tokens"] for record in records) == pytest.approx(plan.tokens, rel=0.05)
