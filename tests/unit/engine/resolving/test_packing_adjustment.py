"""Section 3.3 of PackedBERT is applied to a run file."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import run_files
from hypothesis import given
from hypothesis import strategies as st
from prepared_files import two_sources
from run_files import run_values

from evenpack.config import with_values
from evenpack.data.prepared import PreparedData
from evenpack.engine.config import RunConfig
from evenpack.engine.optimizers.config import ScheduleSection
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
    found = adjusted("none", 1.996)
    assert (found.config, found.adjustment) == (run_config("none"), ())


def test_fewer_accumulations_cuts_the_step_and_nothing_else():
    found = adjusted("fewer_accumulations", 1.996)
    assert found.config.training.packs_per_step == 224
    assert changed_keys(run_config("fewer_accumulations"), found.config) == {
        "training.packs_per_step",
        "training.packing_adjustment",
    }
    said = "\n".join(found.adjustment)
    for part in ("for 1.996 sequences per pack", "training.packs_per_step 448 -> 224", "0.2 % fewer", "stays"):
        assert part in said


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
    """The betas are those of the theorem, squared: `test_lamb.py` has that they give the moments of two updates."""
    found = adjusted("lamb_betas", 2.0)
    optimizer, schedule = found.config.optimizer, found.config.schedule
    assert (optimizer.beta1, optimizer.beta2) == pytest.approx((0.81**2, 0.9243**2))
    assert (found.config.training.steps, schedule.warmup_steps) == (3350, 151)
    assert changed_keys(run_config("lamb_betas"), found.config) == {
        "optimizer.beta1",
        "optimizer.beta2",
        "training.steps",
        "training.packing_adjustment",
        "schedule.warmup_steps",
    }
    said = "\n".join(found.adjustment)
    for part in ("beta1 0.81 -> 0.6561", "training.steps 6700 -> 3350", "warmup_steps 301 -> 151", "448 stays"):
        assert part in said


@pytest.mark.parametrize("kind", ["fewer_accumulations", "lamb_betas"])
def test_nothing_is_adjusted_twice_and_a_factor_of_one_leaves_every_number(kind: str):
    once = adjusted(kind, 2.0)
    again = settle(once.config, facts(2.0))
    assert again.config == once.config != run_config(kind)
    assert again.adjustment == ()
    alone = adjusted(kind, 1.0)
    assert changed_keys(run_config(kind), alone.config) == {"training.packing_adjustment"}
    assert alone.adjustment, "it was asked for, so it is said"


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


@pytest.mark.parametrize("packs", [1, 3])
def test_a_step_that_cannot_be_cut_is_refused(packs: int):
    with pytest.raises(ConfigError, match=rf"packs_per_step \({packs}\) to {packs / 2:.2f} for 2 sequences per pack"):
        adjusted("fewer_accumulations", 2.0, packs_per_step=packs)


def test_the_micro_batch_has_to_divide_the_cut_step_and_not_the_run_files():
    run = adjusted("fewer_accumulations", 1.25, packs_per_step=64, packs_per_micro_batch=13)
    assert run.config.training.packs_per_step == 52
    assert run.micro_batches(2) == 2
    with pytest.raises(ConfigError, match=r"(?s)\(8\) must divide .*\(52\).*1, 2, 13, 26.*packs_per_step 64 -> 52"):
        adjusted("fewer_accumulations", 1.25, packs_per_step=64, packs_per_micro_batch=8).micro_batches(2)


def test_a_stop_behind_the_shortened_run_is_refused_with_the_reason():
    with pytest.raises(
        ConfigError, match=r"(?s)stop_after_steps names step 4000, above training.steps \(3350\)"
    ) as caught:
        adjusted("lamb_betas", 2.0, stop_after_steps=4000)
    assert "training.steps 6700 -> 3350" in str(caught.value)


def test_a_run_of_few_steps_keeps_one():
    sections = {"training": {"steps": 2}, "schedule": {"warmup_steps": 2}}
    adjustment = settle(with_values(run_config("lamb_betas"), sections, origin="a short run"), facts(9.0))
    assert (adjustment.config.training.steps, adjustment.config.schedule.warmup_steps) == (1, 0)


def test_the_measured_factor_weighs_sources_as_the_run_draws_them(finished: Path, corpus: Path):
    config = two_sources(corpus)
    weighed = zip(config.sources.items(), (5, 1), strict=True)
    sources = {name: one.model_copy(update={"weight": weight}) for (name, one), weight in weighed}
    prepared = PreparedData.open(finished, config.model_copy(update={"sources": sources}))
    factors = [
        prepared.view(name, "train").count / prepared.plan(name, "train", seed=1).packs
        for name in prepared.source_names
    ]
    expected = (5 * factors[0] + factors[1]) / 6
    assert float(average_item(prepared, "packs").sequences) == pytest.approx(expected, rel=1e-12)
    assert len(set(factors)) == 2, "sources must differ"


def test_a_source_with_nothing_to_train_on_is_named(finished: Path, corpus: Path):
    prepared = PreparedData.open(finished, two_sources(corpus))
    name = prepared.source_names[1]
    record = prepared.manifest.sources[name]
    empty = record.model_copy(update={"train": record.train.model_copy(update={"packing": None})})
    manifest = prepared.manifest.model_copy(update={"sources": prepared.manifest.sources | {name: empty}})
    with pytest.raises(DataError, match=f"source '{name}' has no sequence to train on"):
        DataFacts.of(PreparedData(finished, prepared.config, manifest), "packs")
