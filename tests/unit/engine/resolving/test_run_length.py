"""The length of a run in steps, epochs, samples or tokens, and when it is evaluated."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenpack.engine.config import TrainingSection
from evenpack.engine.resolving.data_facts import AverageItem, DataFacts
from evenpack.engine.resolving.resolve import is_evaluation_due, mlperf_evaluation_interval, open_run
from evenpack.engine.resolving.settle import steps_of
from evenpack.errors import ConfigError
from evenpack.launcher.training import plan_training
from evenpack.testing import prepared, run_config, run_values, text_sources


def training(**length: Any) -> TrainingSection:
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
    return steps_of(length, facts, items_per_step=packs, parameters=parameters)


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({}, "found none"),
        ({"steps": 3, "epochs": 1.0}, "found steps=3 and epochs=1.0"),
        ({"steps": 3, "tokens": 70}, "found steps=3 and tokens=70"),
        ({"epochs": 2.0, "tokens": 70}, "found epochs=2.0 and tokens=70"),
        ({"tokens": 70, "chinchilla_ratio": 20}, "found tokens=70 and chinchilla_ratio=20.0"),
        ({"epochs": 0.0}, "epochs"),
        ({"tokens": 0}, "tokens"),
        ({"chinchilla_ratio": 0}, "chinchilla_ratio"),
    ],
)
def test_a_run_has_one_length(values: dict[str, Any], found: str) -> None:
    with pytest.raises(ValueError, match=found):
        training(**values)


@pytest.mark.parametrize("accuracy", [0.0, 1.2])
def test_a_target_that_no_model_can_reach_is_refused(accuracy: float) -> None:
    with pytest.raises(ValueError, match="target_accuracy"):
        training(steps=3, target_accuracy=accuracy)


def test_a_target_without_evaluations_is_refused() -> None:
    with pytest.raises(ValueError, match="there are none: set evaluate_every_steps"):
        training(steps=3, target_accuracy=0.5, evaluate_every_steps=None)


@given(
    samples=st.integers(1, 10**9),
    items=st.integers(1, 10**4),
    factor=st.fractions(1, 9, max_denominator=10**4),
)
def test_samples_are_never_exceeded_and_one_more_step_would(samples: int, items: int, factor: Fraction) -> None:
    if samples < items * factor:
        return
    length = training(max_samples=samples)
    steps = steps_with(length, packs=items, sequences=factor)
    assert steps * items * factor <= samples < (steps + 1) * items * factor


def test_mlperf_lengths_come_out_exactly() -> None:
    """3 million samples at batch 1,500 (PackedBERT, figure 3), un-packed and in packs of two on average."""
    length = training(max_samples=3_000_000)
    assert steps_with(length, packs=1500) == 2000
    assert steps_with(length, packs=750, sequences=Fraction(2)) == 2000


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
    steps = steps_with(training(tokens=tokens), tokens=held)
    assert (steps - 1) * held < tokens <= steps * held
    ratio = Fraction(str(tokens / 1000))
    if ratio * parameters < held or ratio > 10**9:
        return
    by_ratio = training(chinchilla_ratio=float(ratio))
    steps = steps_with(by_ratio, tokens=held, parameters=parameters)
    assert (steps - 1) * held < ratio * parameters <= steps * held


def test_gpt2_small_is_compute_optimal_after_2_5_billion_tokens() -> None:
    length = training(chinchilla_ratio=20)
    assert steps_with(length, tokens=Fraction(524_288), parameters=124_439_808) == 4748  # 2,488,796,160 / 524,288


@pytest.mark.parametrize(
    ("length", "message"),
    [
        ({"max_samples": 5}, r"max_samples \(5\) is less than the 16\.0 samples of one step"),
        ({"tokens": 999}, r"tokens \(999\) is less than the 1,000\.0 tokens of one step"),
        ({"chinchilla_ratio": 0.1}, r"\(0\.1\) is less than the 10\.0 tokens per parameter of one step"),
    ],
)
def test_less_than_a_step_holds_is_refused(length: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        steps_with(training(**length), sequences=Fraction(16), tokens=Fraction(1000), parameters=100)


def test_evaluations_by_samples_come_with_the_step_that_completes_them() -> None:
    length = training(steps=20, evaluate_every_samples=25)
    due = [step for step in range(1, 21) if is_evaluation_due(length, step, samples_per_step=Fraction(10))]
    assert due == [3, 5, 8, 10, 13, 15, 18, 20]
    by_steps = training(steps=7, evaluate_every_steps=3)
    assert [step for step in range(1, 8) if is_evaluation_due(by_steps, step, samples_per_step=Fraction(1))] == [
        3,
        6,
        7,
    ]


def test_a_stop_in_between_adds_no_evaluation() -> None:
    length = training(steps=7, evaluate_every_steps=3, stop_after_steps=5)
    assert [step for step in range(1, 8) if is_evaluation_due(length, step, samples_per_step=Fraction(1))] == [3, 6, 7]


def test_mlperf_evaluates_by_its_rule() -> None:
    """For the batches of 448 and 3,072 samples by hand: 0.05 (230.23 x 448 + 3e6) = 155,157 -> 150,000."""
    assert mlperf_evaluation_interval(448.0) == 150_000
    assert mlperf_evaluation_interval(768.0) == 150_000
    assert mlperf_evaluation_interval(3072.0) == 175_000
    length = training(steps=3680, evaluate_every_samples="mlperf")
    due = [step for step in range(1, 3680) if is_evaluation_due(length, step, samples_per_step=Fraction(768))]
    assert due[:3] == [196, 391, 586], "150,000 samples are 195.3 steps"


@pytest.mark.parametrize(
    "length", [{"epochs": 3.0}, {"max_samples": 300}, {"tokens": 2000}, {"chinchilla_ratio": 0.07}]
)
@pytest.mark.parametrize("batching", ["packs", "sequences"])
def test_the_plan_shows_the_steps_that_a_length_comes_to(tmp_path: Path, length: dict[str, Any], batching: str) -> None:
    documents = ["x" * (1 + number % 9) for number in range(80)]
    section = {"steps": None, **length, "batching": batching}
    if batching == "sequences":
        section |= {"packs_per_step": None, "packs_per_micro_batch": None}
        section |= {"layout": "unpadded", "sequences_per_step": 8, "sequences_per_micro_batch": 2}
    data = {"sources": text_sources(tmp_path, {"lines": documents})}
    config = prepared(run_config(run_values("gpt2", tmp_path, data=data, training=section)))
    plan, run = plan_training(config, ranks=2), open_run(config)
    assert run.config.training.planned_steps == plan.steps
    if "epochs" in length:
        assert (
            plan.epochs["lines"] - plan.items_per_step / run.prepared.manifest.sources["lines"].train.packing.packs < 3
        )
        assert plan.epochs["lines"] >= 3
    elif "max_samples" in length:
        assert plan.steps * plan.samples_per_step <= 300 < (plan.steps + 1) * plan.samples_per_step
    else:
        tokens = length.get("tokens") or 0.07 * plan.parameters
        assert plan.tokens == pytest.approx(plan.steps * plan.tokens_per_step)
        assert plan.tokens - plan.tokens_per_step < tokens <= plan.tokens
        assert plan.tokens_per_parameter == pytest.approx(plan.tokens / plan.parameters)
    assert f"training.steps {plan.steps}, of " in "".join(plan.packing_adjustment)
    assert open_run(run.config).config == run.config, "a checkpoint's run file is whole"
