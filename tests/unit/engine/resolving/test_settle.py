"""The size of a step, the length of a run in steps, epochs, samples or tokens, and when it is evaluated."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_files import prepared, run_config, run_values, text_sources
from tiny_run import lone_world, tiny_gpt2_run

from evenpack.engine.config import RunConfig, TrainingSection
from evenpack.engine.reporting.metrics import METRICS, read_metrics
from evenpack.engine.resolving.data_facts import AverageItem, DataFacts
from evenpack.engine.resolving.resolve import is_evaluation_due, mlperf_evaluation_interval, open_run
from evenpack.engine.resolving.settle import items_for_tokens, steps_of
from evenpack.engine.train import train_in
from evenpack.engine.where import open_where
from evenpack.errors import ConfigError
from evenpack.launcher.planning import plan_training
from evenpack.studies.throughput.contenders import changed


def training(tokens_per_step: int, micro_batch: int) -> TrainingSection:
    return TrainingSection(tokens_per_step=tokens_per_step, packs_per_micro_batch=micro_batch, steps=1)


def item(tokens: Fraction) -> AverageItem:
    return AverageItem(sequences=Fraction(1), tokens=tokens, row_slots=1024)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return tiny_gpt2_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder = tmp_path_factory.mktemp("lines")
    sources = text_sources(folder, {"lines": ["x" * (1 + number % 9) for number in range(80)]})
    return prepared(run_config(run_values("gpt2", folder, data={"sources": sources})))


OF_SEQUENCES = {
    "batching": "sequences",
    "layout": "unpadded",
    "packs_per_step": None,
    "packs_per_micro_batch": None,
    "sequences_per_step": 8,
    "sequences_per_micro_batch": 2,
}


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
    with pytest.raises(ConfigError, match=r"tokens_per_step \(500\) is 5.00 packs .*one micro-batch holds 800 tokens"):
        items_for_tokens(training(500, 8), item(Fraction(100)))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"packs_per_step": 8}, r"tokens_per_step \(900\) and packs_per_step \(8\) both give the size"),
        ({"packing_adjustment": "fewer_accumulations"}, "tokens_per_step counts tokens"),
        ({"tokens_per_step": None}, "packs_per_step is required, or tokens_per_step"),
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


def test_ranks_that_get_less_than_a_micro_batch_are_told_how_the_step_was_computed(config: RunConfig) -> None:
    run = open_run(config)
    asked = round(4 * run.item.tokens)
    with pytest.raises(ConfigError, match=rf"(?s)must divide .*tokens_per_step {asked}: training\.packs_per_step 4 "):
        plan_training(by_tokens(config, asked), ranks=2)


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
    assert len(records) == plan.cost.steps == -(-3_100 // plan.step.tokens)
    assert sum(record["tokens"] for record in records) == pytest.approx(plan.cost.tokens, rel=0.05)


def section(**length: Any) -> TrainingSection:
    return TrainingSection(packs_per_step=1, packs_per_micro_batch=1, **length)


def steps_with(
    length: TrainingSection,
    *,
    sequences: Fraction = Fraction(1),
    tokens: Fraction = Fraction(1),
    packs: int = 1,
    parameters: int = 1,
) -> int:
    """Returns the steps of `packs` packs of so many sequences and tokens, for a model of so many parameters."""
    item = AverageItem(sequences=sequences, tokens=tokens, row_slots=1)
    facts = DataFacts(item=item, items_per_epoch=1, vocabulary_size=1)
    return steps_of(length, facts, items_per_step=packs, parameters=parameters)[0]


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({}, "found none"),
        ({"steps": 3, "epochs": 1.0}, "found steps=3 and epochs=1.0"),
        ({"epochs": 2.0, "tokens": 70}, "found epochs=2.0 and tokens=70"),
        ({"tokens": 70, "chinchilla_ratio": 20}, "found tokens=70 and chinchilla_ratio=20.0"),
    ],
)
def test_a_run_has_one_length(values: dict[str, Any], found: str) -> None:
    with pytest.raises(ValueError, match=found):
        section(**values)


def test_a_target_without_evaluations_is_refused() -> None:
    with pytest.raises(ValueError, match="there are none: set evaluate_every_steps"):
        section(steps=3, target_accuracy=0.5, evaluate_every_steps=None)


@given(
    samples=st.integers(1, 10**9),
    items=st.integers(1, 10**4),
    factor=st.fractions(1, 9, max_denominator=10**4),
)
def test_samples_are_never_exceeded_and_one_more_step_would(samples: int, items: int, factor: Fraction) -> None:
    if samples < items * factor:
        return
    length = section(max_samples=samples)
    steps = steps_with(length, packs=items, sequences=factor)
    assert steps * items * factor <= samples < (steps + 1) * items * factor


@given(
    tokens=st.integers(1, 10**12),
    held=st.fractions(1, 10**7, max_denominator=10**4),
    parameters=st.integers(1, 10**9),
)
def test_all_requested_tokens_are_trained_on_and_one_step_less_would_not_do(
    tokens: int, held: Fraction, parameters: int
) -> None:
    if tokens < held:
        return
    steps = steps_with(section(tokens=tokens), tokens=held)
    assert (steps - 1) * held < tokens <= steps * held
    ratio = Fraction(str(tokens / 1000))
    if ratio * parameters < held or ratio > 10**9:
        return
    by_ratio = section(chinchilla_ratio=float(ratio))
    steps = steps_with(by_ratio, tokens=held, parameters=parameters)
    assert (steps - 1) * held < ratio * parameters <= steps * held


@pytest.mark.parametrize(
    ("length", "message"),
    [
        ({"max_samples": 5}, r"\(5\) is less than the 16\.0 samples of one step"),
        ({"tokens": 999}, r"\(999\) is less than the 1,000\.0 tokens of one step"),
        ({"chinchilla_ratio": 0.1}, r"\(0\.1\) is less than the 10\.0 tokens per parameter of one step"),
    ],
)
def test_less_than_a_step_holds_is_refused(length: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        steps_with(section(**length), sequences=Fraction(16), tokens=Fraction(1000), parameters=100)


def due_steps(length: TrainingSection, samples_per_step: int) -> list[int]:
    steps = range(1, (length.steps or 0) + 1)
    return [step for step in steps if is_evaluation_due(length, step, samples_per_step=Fraction(samples_per_step))]


def test_evaluations_by_samples_come_with_the_step_that_completes_them() -> None:
    assert due_steps(section(steps=20, evaluate_every_samples=25), 10) == [3, 5, 8, 10, 13, 15, 18, 20]
    assert due_steps(section(steps=7, evaluate_every_steps=3), 1) == [3, 6, 7]
    stopped = section(steps=7, evaluate_every_steps=3, stop_after_steps=5)
    assert due_steps(stopped, 1) == [3, 6, 7], "a stop in between adds none"


def test_mlperf_evaluates_by_its_rule() -> None:
    """For the batches of 448 and 3,072 samples by hand: 0.05 (230.23 x 448 + 3e6) = 155,157 -> 150,000."""
    assert mlperf_evaluation_interval(448.0) == 150_000
    assert mlperf_evaluation_interval(768.0) == 150_000
    assert mlperf_evaluation_interval(3072.0) == 175_000
    length = section(steps=600, evaluate_every_samples="mlperf")
    assert due_steps(length, 768)[:3] == [196, 391, 586], "150,000 samples are 195.3 steps"


@pytest.mark.parametrize(
    "length", [{"epochs": 3.0}, {"max_samples": 300}, {"tokens": 2000}, {"chinchilla_ratio": 0.07}]
)
@pytest.mark.parametrize("sizes", [{}, OF_SEQUENCES], ids=["packs", "sequences"])
def test_the_plan_shows_the_steps_that_a_length_comes_to(
    lines: RunConfig, length: dict[str, Any], sizes: dict[str, Any]
) -> None:
    config = changed(lines, training={"steps": None, **length, **sizes})
    plan, run = plan_training(config, ranks=2), open_run(config)
    assert run.config.training.planned_steps == plan.cost.steps
    if "epochs" in length:
        (epochs,) = [one.epochs for one in plan.data.sources]
        assert epochs - plan.step.items / run.prepared.manifest.sources["lines"].train.packing.packs < 3 <= epochs
    elif "max_samples" in length:
        assert plan.cost.steps * plan.step.sequences <= 300 < (plan.cost.steps + 1) * plan.step.sequences
    else:
        tokens = length.get("tokens") or 0.07 * plan.cost.parameters
        assert plan.cost.tokens - plan.step.tokens < tokens <= plan.cost.tokens
        assert plan.cost.tokens == pytest.approx(plan.cost.steps * plan.step.tokens)
        assert plan.cost.tokens_per_parameter == pytest.approx(plan.cost.tokens / plan.cost.parameters)
    assert f"training.steps {plan.cost.steps}, of " in "".join(plan.start.packing_adjustment)
    assert open_run(run.config).config == run.config, "a checkpoint's run file is whole"
