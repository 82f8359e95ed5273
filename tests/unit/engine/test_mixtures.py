"""Mixtures of a run: weights that change, permitted edits, bounds on repeats, one loss by fixed weights."""

from pathlib import Path
from typing import Any

import pytest
from prepared_files import Recorder, sentences

from evenpack.data.prepare.prepare import prepare
from evenpack.data.prepared import PreparedData
from evenpack.engine.checkpoints.continuation import require_same_past_mixture
from evenpack.engine.checkpoints.files import TrainState
from evenpack.engine.config import RunConfig
from evenpack.engine.evaluate import SourceEvaluation, aggregate_loss
from evenpack.engine.resolving.resolve import open_run
from evenpack.engine.where import open_where
from evenpack.errors import CheckpointError, ConfigError, DataError
from evenpack.launcher.planning import plan_training
from evenpack.studies.plan.options import PlanOptions
from evenpack.studies.plan.plan import plan_run
from evenpack.studies.plan.presentation import plan_shown
from evenpack.testing import changed, prepared, run_config, run_values, text_sources

Schedule = list[dict[str, Any]]
STEPS = 12
SCHEDULE: Schedule = [{"step": 4, "weights": {"code": 5}}, {"step": 9, "weights": {"wiki": 1, "code": 9}}]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """Prepares enough of wiki for the run, and far too little of code."""
    folder = tmp_path_factory.mktemp("mixtures")
    texts = {name: [text[:70] for text in sentences(count, seed=count)] for name, count in (("wiki", 90), ("code", 8))}
    data = {"sources": text_sources(folder, texts), "validation_fraction": 0.1}
    return prepared(run_config(run_values("gpt2", folder, data=data, training={"steps": STEPS})))


def scheduled(config: RunConfig, schedule: Schedule, **training: Any) -> RunConfig:
    return changed(config, data={"mixture_schedule": schedule}, training=training)


def bounded(config: RunConfig, **data: Any) -> RunConfig:
    sources = config.data.model_dump()["sources"]
    sources["code"]["maximum_epochs"] = 2.0
    return changed(config, data={"sources": sources, **data})


@pytest.mark.parametrize(
    ("schedule", "training", "told"),
    [
        ([{"step": 4, "weights": {"wki": 2}}], {}, "entry of step 4: there is no source 'wki'; did you mean 'wiki'"),
        ([{"step": 4, "weights": {"wiki": 0}}], {}, "entry of step 4: the weight of 'wiki' is 0: give"),
        (
            [{"step": 4, "weights": {"wiki": -2}}],
            {},
            "entry of step 4: the weight of 'wiki' is -2: give",
        ),
        (
            [{"step": 4, "weights": {"wiki": 1.5}}],
            {},
            "entry of step 4: the weight of 'wiki' is 1.5: give",
        ),
        ([{"step": 4, "weights": {}}], {}, "mixture_schedule.weights: .* at least 1 item"),
        ([{"step": 1, "weights": {"wiki": 2}}], {}, "mixture_schedule.step: .* equal to 2, found 1"),
        ([SCHEDULE[1], SCHEDULE[0]], {}, "the entry of step 4 comes after the entry of step 9"),
        ([SCHEDULE[0], SCHEDULE[0]], {}, "the entry of step 4 comes after the entry of step 4"),
        ([{"step": 13, "weights": {"wiki": 2}}], {}, r"an entry of step 13, above training.steps \(12\)"),
        (SCHEDULE, {"steps": None, "epochs": 2.0}, "by steps.*: give training.steps"),
        (SCHEDULE, {"packs_per_step": None, "tokens_per_step": 200}, "set training.tokens_per_step=null"),
        (SCHEDULE, {"packing_adjustment": "fewer_accumulations"}, "set training.packing_adjustment=none"),
        ([], {"validation_weights": {"cod": 1}}, "no source 'cod'; did you mean 'code'"),
        ([], {"validation_weights": {"code": 0}}, "validation_weights.code.* found 0"),
        ([], {"validation_weights": {}}, "validation_weights names no source"),
    ],
)
def test_weights_that_cannot_be_are_refused(config: RunConfig, schedule: Schedule, training: Any, told: str):
    with pytest.raises(ConfigError, match=told):
        scheduled(config, schedule, **training)


def test_no_file_depends_on_the_mixture(config: RunConfig):
    """Otherwise an existing prepared set would be refused."""
    for one in (scheduled(config, SCHEDULE), bounded(config, on_maximum_epochs="warn")):
        PreparedData.open(one.prepared_dir, one.data)


def state_at(step: int, config: RunConfig) -> TrainState:
    run = open_run(config)
    return TrainState(
        step=step,
        fingerprint=run.fingerprint(step),
        world_size=1,
        zero_stage=0,
        cost_weights=run.shape.cost_weights,
        config=run.config.model_dump(mode="json"),
        reached_accuracy=None,
        validation_loss=None,
        samples=0,
    )


@pytest.mark.parametrize(
    ("before", "now", "step"),
    [
        ([], SCHEDULE, 3),
        (SCHEDULE, [], 3),
        (SCHEDULE, SCHEDULE[:1], 8),
        (SCHEDULE, [SCHEDULE[0], {"step": 7, "weights": {"wiki": 3}}], 6),
        (SCHEDULE, SCHEDULE, 12),
    ],
)
def test_the_schedule_of_later_steps_may_be_edited(config: RunConfig, before: Schedule, now: Schedule, step: int):
    state, run = state_at(step, scheduled(config, before)), open_run(scheduled(config, now))
    require_same_past_mixture(state, run.config.data)
    assert run.fingerprint(step) == state.fingerprint


@pytest.mark.parametrize(
    ("before", "now", "step", "told"),
    [
        ([], SCHEDULE, 4, "entry of step 4 was not there, and is code 5 now"),
        (SCHEDULE, SCHEDULE[:1], 9, "entry of step 9 was wiki 1, code 9, and is not there now"),
        (SCHEDULE, [{"step": 4, "weights": {"code": 6}}, SCHEDULE[1]], 6, "entry of step 4 was code 5, and is code 6"),
        (SCHEDULE, [{"step": 5, "weights": {"code": 5}}, SCHEDULE[1]], 6, "entry of step 4 was code 5.* not there"),
    ],
)
def test_the_schedule_of_steps_that_are_done_may_not(
    config: RunConfig, before: Schedule, now: Schedule, step: int, told: str
):
    state, run = state_at(step, scheduled(config, before)), open_run(scheduled(config, now))
    with pytest.raises(CheckpointError, match=f"step {step} is reached.*{told}"):
        require_same_past_mixture(state, run.config.data)
    assert run.fingerprint(step) != state.fingerprint


def test_what_is_shown_before_the_run_is_what_it_draws(config: RunConfig):
    config = scheduled(config, SCHEDULE)
    where, run = open_where(config), open_run(config)
    drawn = {"wiki": 0, "code": 0}
    for step in range(1, STEPS + 1):
        for name in {(one.source, one.pack): one.source for one in where.step(step).sequences}.values():
            drawn[name] += 1
        packs = {source.name: source.packed.plan.packs for source in where.sources}
        assert run.epochs(step) == {name: drawn[name] / packs[name] for name in drawn}
    epochs = {one.source: one.epochs for one in plan_training(config, ranks=1).data.sources}
    assert drawn["code"] > STEPS * 8 / 2
    for name, count in drawn.items():
        assert epochs[name] == pytest.approx(count / packs[name])


def test_more_epochs_than_a_source_may_have_are_refused_or_reported(
    config: RunConfig, caplog: pytest.LogCaptureFixture
):
    with pytest.raises(ConfigError, match=r"(?s)12 steps .*code: .* epochs, at most 2\n.*on_maximum_epochs"):
        plan_training(bounded(config), ranks=1)
    open_run(bounded(config))  # evaluation and export do not ask
    assert not caplog.records
    plan_training(bounded(config, on_maximum_epochs="warn"), ranks=1)
    assert "at most 2" in caplog.text
    plan_training(bounded(changed(config, training={"steps": 1})), ranks=1)
    plan = plan_run(bounded(config), PlanOptions(), ranks=1)
    sources = {source.source: source for source in plan.data.sources}
    assert (sources["code"].maximum_epochs, sources["wiki"].maximum_epochs) == (2.0, None)
    assert sources["code"].epochs > 2.0
    assert list(plan_shown(plan))


def evaluation(loss: float, *, targets: int) -> SourceEvaluation:
    return SourceEvaluation(loss=loss, accuracy=0.5, others={}, targets=targets, sequences=1, packs=1)


def test_one_loss_of_all_goes_by_named_weights_and_not_by_what_is_held_out():
    for targets in (1, 1000):
        found = {"wiki": evaluation(2.0, targets=targets), "code": evaluation(4.0, targets=10)}
        assert aggregate_loss(found, {"wiki": 3.0, "code": 1.0}) == {
            "loss": 2.5,
            "weights": {"wiki": 3.0, "code": 1.0},
        }
        assert aggregate_loss(found, {"code": 0.5}) == {"loss": 4.0, "weights": {"code": 0.5}}
        assert aggregate_loss(found, None) is None
    with pytest.raises(DataError, match="names code, of which nothing is held out"):
        aggregate_loss({"wiki": evaluation(2.0, targets=1)}, {"wiki": 1.0, "code": 1.0})


def test_a_source_that_holds_nothing_out_is_reported_when_it_is_prepared(tmp_path: Path):
    texts = {"many": [text[:40] for text in sentences(80, seed=1)], "few": ["a single document"]}
    config = run_config(
        run_values("gpt2", tmp_path, data={"sources": text_sources(tmp_path, texts), "validation_fraction": 0.1})
    )
    recorder = Recorder()
    prepare(config.data, config.prepared_dir, progress=recorder)
    assert [note for note in recorder.notes if note.startswith("warning: source 'few' holds nothing out")]
    assert not [note for note in recorder.notes if "'many' holds" in note]
    weights = changed(config, training={"validation_weights": {"few": 1.0}})
    with pytest.raises(ConfigError, match="names few, of which nothing is held out"):
        plan_training(weights, ranks=1)
