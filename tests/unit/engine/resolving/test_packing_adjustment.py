"""Section 3.3 of PackedBERT is applied to a run file."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import run_files
import torch
from hypothesis import given
from hypothesis import strategies as st
from prepared_files import two_sources
from run_files import run_values

from evenpack.config import with_values
from evenpack.data.prepared import PreparedData
from evenpack.engine.config import RunConfig
from evenpack.engine.optimizers.config import ScheduleSection
from evenpack.engine.optimizers.lamb import Lamb
from evenpack.engine.resolving.data_facts import AverageItem, DataFacts, average_item
from evenpack.engine.resolving.settle import SettledRun, settle
from evenpack.errors import ConfigError, DataError


def run_config(kind: str, **training: Any) -> RunConfig:
    """Returns NVIDIA's MLPerf settings for 8 A100, except for betas and warm-up."""
    step = {"packs_per_step": 448, "packs_per_micro_batch": 1, "steps": 6700, "packing_adjustment": kind}
    return run_files.run_config(
        run_values(
            "gpt2",
            Path("nowhere"),
            training={**step, **training},
            optimizer={"kind": "lamb", "learning_rate": 4.25e-4, "beta1": 0.81, "beta2": 0.9243},
            schedule={"kind": "polynomial", "warmup_steps": 301, "final_fraction": 0.0},
        )
    )


def facts(factor: float) -> DataFacts:
    """Returns data with so many sequences per pack."""
    item = AverageItem(sequences=Fraction(factor), tokens=Fraction(8), row_slots=8)
    return DataFacts(item=item, items_per_epoch=None, vocabulary_size=100)


def adjusted(kind: str, factor: float, **training: Any) -> SettledRun:
    return settle(run_config(kind, **training), facts(factor))


def changed_keys(before: RunConfig, after: RunConfig) -> set[str]:
    return {
        f"{section}.{name}"
        for section, values in before.model_dump().items()
        for name, value in (values or {}).items()
        if after.model_dump()[section][name] != value
    }


def test_none_changes_and_logs_nothing():
    adjustment = adjusted("none", 1.996)
    assert adjustment.config == run_config("none")
    assert adjustment.adjustment == ()


def test_fewer_accumulations_cuts_the_step_and_nothing_else():
    adjustment = adjusted("fewer_accumulations", 1.996)
    assert adjustment.config.training.packs_per_step == 224
    assert changed_keys(run_config("fewer_accumulations"), adjustment.config) == {
        "training.packs_per_step",
        "training.packing_adjustment",
    }
    assert adjustment.adjustment == (
        "packing adjustment fewer_accumulations for 1.996 sequences per pack",
        "training.packs_per_step 448 -> 224 (exactly 224.45): 447.1 sequences per step on average, 0.2 % fewer than "
        "without packing",
        "optimizer.learning_rate 0.000425 stays",
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [((300, 1000), (150, 500)), ((301, 6399), (151, 3199)), ((3, 1), (1, 1)), ((300, 0), (150, 0))],
    ids=["both halved", "the whole run", "never to none", "a trunk"],
)
def test_lamb_betas_shrinks_a_decay_with_the_warmup(before, after):
    config, (warmup, decay) = run_config("lamb_betas"), before
    config = config.model_copy(update={"schedule": ScheduleSection(kind="wsd", warmup_steps=warmup, decay_steps=decay)})
    schedule = settle(config, facts(2.0 if decay != 1 else 3.0)).config.schedule
    assert (schedule.warmup_steps, schedule.decay_steps) == after


def test_lamb_betas_keeps_the_step_and_shrinks_the_rest():
    adjustment = adjusted("lamb_betas", 2.0)
    optimizer, schedule = adjustment.config.optimizer, adjustment.config.schedule
    assert optimizer.beta1 == pytest.approx(0.6561)
    assert optimizer.beta2 == pytest.approx(0.85433049)
    assert (adjustment.config.training.steps, schedule.warmup_steps) == (3350, 151)
    assert changed_keys(run_config("lamb_betas"), adjustment.config) == {
        "optimizer.beta1",
        "optimizer.beta2",
        "training.steps",
        "training.packing_adjustment",
        "schedule.warmup_steps",
    }
    assert adjustment.adjustment == (
        "packing adjustment lamb_betas for 2 sequences per pack",
        "optimizer.beta1 0.81 -> 0.6561, beta2 0.9243 -> 0.85433",
        "training.steps 6700 -> 3350 (exactly 3350.00); total sequences: as many as without packing",
        "schedule.warmup_steps 301 -> 151 (exactly 150.50)",
        "training.packs_per_step 448 stays: 896.0 sequences per step on average",
        "optimizer.learning_rate 0.000425 stays",
    )


@pytest.mark.parametrize("kind", ["fewer_accumulations", "lamb_betas"])
def test_nothing_is_adjusted_twice(kind: str):
    once = adjusted(kind, 2.0)
    again = settle(once.config, facts(2.0))
    assert again.config == once.config != run_config(kind)
    assert again.adjustment == ()


@pytest.mark.parametrize("kind", ["fewer_accumulations", "lamb_betas"])
def test_a_factor_of_one_leaves_every_number(kind: str):
    adjustment = adjusted(kind, 1.0)
    assert changed_keys(run_config(kind), adjustment.config) == {"training.packing_adjustment"}
    assert adjustment.adjustment, "it was asked for, so it is said"


def test_the_adjusted_betas_are_those_of_the_theorem():
    """p updates of the run as written, and one of the adjusted run, from the same moments and with one gradient."""
    moments = []
    for config, updates in [(run_config("lamb_betas"), 3), (adjusted("lamb_betas", 3.0).config, 1)]:
        parameter = torch.nn.Parameter(torch.ones(3, 4, dtype=torch.float64))
        optimizer = Lamb([parameter], lr=0.1, betas=(config.optimizer.beta1, config.optimizer.beta2))
        parameter.grad = torch.linspace(-2.0, 3.0, 12, dtype=torch.float64).view(3, 4)
        for _ in range(updates):
            optimizer.step()
        moments.append(torch.stack([optimizer.state[parameter][name] for name in ("exp_avg", "exp_avg_sq")]))
    torch.testing.assert_close(moments[1], moments[0], rtol=1e-12, atol=0.0)


@given(packs=st.integers(1, 5000), factor=st.floats(1.0, 30.0))
def test_the_step_stays_near_the_batch_or_is_refused(packs: int, factor: float):
    config = run_config("fewer_accumulations", packs_per_step=packs)
    try:
        cut = settle(config, facts(factor)).config.training.packs_per_step
    except ConfigError:
        near = [number for number in range(1, packs + 1) if abs(number * factor / packs - 1.0) <= 0.25]
        assert near == []
        return
    assert abs(cut * factor / packs - 1.0) <= 0.25
    if packs / factor >= 10:  # a whole number is within 5 % there
        assert abs(cut * factor / packs - 1.0) <= 0.05 + 1e-12


@pytest.mark.parametrize(
    ("packs", "factor", "expected"),
    [
        (65_536, 1.1966, 55_296),  # 54,769; 27 x 2,048 is 1 % more, 7 x 8,192 nearly 5
        (32_768, 1.7416, 18_944),  # 18,815; 37 x 512
        (512, 2.31, 224),  # 221.6; 7 x 32 rather than 222; nothing within 1 % is a multiple of 8
        (64, 2.3, 28),
        (8, 2.3, 4),  # 3.48; 4 is 15 % off, 3 is 14 %, and 4 divides better
        (2, 2.3, 1),
        (7, 7.0, 1),
    ],
)
def test_the_step_divides_as_well_as_it_can(packs: int, factor: float, expected: int):
    assert adjusted("fewer_accumulations", factor, packs_per_step=packs).config.training.packs_per_step == expected


@pytest.mark.parametrize(("packs", "factor"), [(1, 2.0), (3, 2.0)])
def test_a_step_that_cannot_be_cut_is_refused(packs: int, factor: float):
    with pytest.raises(
        ConfigError, match=rf"packs_per_step \({packs}\) to {packs / factor:.2f} for 2 sequences per pack"
    ):
        adjusted("fewer_accumulations", factor, packs_per_step=packs)


def test_the_micro_batch_has_to_divide_the_cut_step_and_not_the_run_files():
    run = adjusted("fewer_accumulations", 1.25, packs_per_step=64, packs_per_micro_batch=13)
    assert run.config.training.packs_per_step == 52
    assert run.micro_batches(2) == 2


def test_a_micro_batch_that_a_cut_step_cannot_hold_is_refused_with_what_it_can():
    run = adjusted("fewer_accumulations", 1.25, packs_per_step=64, packs_per_micro_batch=8)
    with pytest.raises(ConfigError) as caught:
        run.micro_batches(2)
    message = str(caught.value)
    assert "2 ranks x training.packs_per_micro_batch (8) must divide training.packs_per_step (52)" in message
    assert "With this packs_per_micro_batch no number of ranks is valid" in message
    assert "2 ranks can do packs_per_micro_batch 1, 2, 13, 26" in message
    assert "training.packs_per_step 64 -> 52" in message


def test_a_stop_behind_the_shortened_run_is_refused_with_the_reason():
    with pytest.raises(ConfigError) as caught:
        adjusted("lamb_betas", 2.0, stop_after_steps=4000)
    assert "training.steps 6700 -> 3350" in str(caught.value)
    assert "training.stop_after_steps (4000) is above training.steps (3350)" in str(caught.value)


def test_a_run_of_few_steps_keeps_one():
    sections = {"training": {"steps": 2}, "schedule": {"warmup_steps": 2}}
    adjustment = settle(with_values(run_config("lamb_betas"), sections, origin="a short run"), facts(9.0))
    assert (adjustment.config.training.steps, adjustment.config.schedule.warmup_steps) == (1, 0)


@pytest.mark.parametrize("factor", [0.99, 0.0])
def test_a_factor_that_cannot_be_is_refused(factor: float):
    with pytest.raises(ValueError, match="a packing factor is at least 1"):
        adjusted("lamb_betas", factor)


def test_the_measured_factor_weighs_sources_as_the_run_draws_them(finished: Path, corpus: Path):
    config = two_sources(corpus)
    first, second = config.sources
    sources = {
        first: config.sources[first].model_copy(update={"weight": 5}),
        second: config.sources[second].model_copy(update={"weight": 1}),
    }
    prepared = PreparedData.open(finished, config.model_copy(update={"sources": sources}))
    assert prepared.weights == (5, 1)
    factors = {}
    for name in prepared.source_names:
        plan = prepared.plan(name, "train", seed=1)
        packing = prepared.manifest.sources[name].train.packing
        assert packing is not None
        assert packing.packs == plan.packs
        factors[name] = prepared.view(name, "train").count / plan.packs
    weights = dict(zip(prepared.source_names, prepared.weights, strict=True))
    expected = sum(weights[name] * factors[name] for name in factors) / sum(weights.values())
    assert float(average_item(prepared, "packs").sequences) == pytest.approx(expected, rel=1e-12)
    assert len(set(factors.values())) == 2, "sources must differ"


def test_a_source_with_nothing_to_train_on_is_named(finished: Path, corpus: Path):
    prepared = PreparedData.open(finished, two_sources(corpus))
    name = prepared.source_names[1]
    record = prepared.manifest.sources[name]
    empty = record.model_copy(update={"train": record.train.model_copy(update={"packing": None})})
    manifest = prepared.manifest.model_copy(update={"sources": prepared.manifest.sources | {name: empty}})
    with pytest.raises(DataError, match=f"source '{name}' has no sequence to train on"):
        DataFacts.of(PreparedData(finished, prepared.config, manifest), "packs")
