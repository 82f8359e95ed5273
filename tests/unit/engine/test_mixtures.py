"""Stages of a run: weights and steps that change, permitted edits, bounds on repeats, one loss by fixed weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from prepared_files import Recorder, sentences
from run_files import changed, prepared, run_config, run_values, text_sources
from tiny_run import train_state

from evenpack.data.batches.pipeline import MicroBatchDataset, PipelineSettings
from evenpack.data.order.selection import order_hash
from evenpack.data.prepare.prepare import prepare
from evenpack.data.prepared import PreparedData
from evenpack.engine.checkpoints.continuation import continued
from evenpack.engine.checkpoints.files import TrainState
from evenpack.engine.config import RunConfig
from evenpack.engine.resolving.resolve import open_run
from evenpack.engine.where import open_where
from evenpack.engine.world.distributed import World
from evenpack.errors import CheckpointError, ConfigError
from evenpack.launcher.planning import plan_training
from evenpack.studies.plan.presentation import plan_shown

Stages = list[dict[str, Any]]
STEPS = 12
WIKI, CODE = "data.sources.wiki.weight", "data.sources.code.weight"
PACKS, PACKS_AT_ONCE = "training.packs_per_step", "training.packs_per_micro_batch"
STAGES: Stages = [{"step": 4, CODE: 5, PACKS: 4}, {"step": 9, WIKI: 1, CODE: 9}]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """Prepares enough of wiki for the run, and far too little of code."""
    folder = tmp_path_factory.mktemp("mixtures")
    texts = {name: [text[:70] for text in sentences(count, seed=count)] for name, count in (("wiki", 90), ("code", 8))}
    data = {"sources": text_sources(folder, texts), "validation_fraction": 0.1}
    return prepared(run_config(run_values("gpt2", folder, data=data, training={"steps": STEPS})))


def staged(config: RunConfig, stages: Stages, **training: Any) -> RunConfig:
    return changed(config, stages=stages, training=training)


@pytest.mark.parametrize(
    ("stages", "training", "told"),
    [
        ([{"step": 4, "data.sources.wki.weight": 2}], {}, "step 4: there is no source 'wki'; did you mean 'wiki'"),
        ([{"step": 4, WIKI: -2}], {}, r"the stage of step 4:\n.*wiki.weight.*found -2"),
        ([{"step": 4, WIKI: 0, CODE: 0}], {}, r"the stage of step 4:\n.*every source has weight 0"),
        ([{"step": 4, PACKS: 7}], {}, r"the stage of step 4:\n.*packs_per_micro_batch \(2\) must divide .*\(7\)"),
        ([{"step": 4, "model.hidden_size": 64}], {}, "stages, step 4: model.hidden_size cannot change within a run"),
        ([{"step": 4}], {}, "stages, step 4: it changes nothing"),
        ([STAGES[1], STAGES[0]], {}, "that of step 4 comes after that of step 9"),
        ([STAGES[0], STAGES[0]], {}, "that of step 4 comes after that of step 4"),
        ([{"step": 13, WIKI: 2}], {}, r"stages names step 13, above training.steps \(12\)"),
        (STAGES, {"steps": None, "epochs": 2.0}, "by steps.*: give training.steps"),
        (STAGES, {"packing_adjustment": "fewer_accumulations"}, "set training.packing_adjustment=none"),
    ],
)
def test_weights_that_cannot_be_are_refused(config: RunConfig, stages: Stages, training: Any, told: str):
    with pytest.raises(ConfigError, match=f"(?s){told}"):
        staged(config, stages, **training)


def test_no_file_depends_on_the_mixture(config: RunConfig):
    """Otherwise an existing prepared set would be refused."""
    one = staged(config, STAGES)
    PreparedData.open(one.prepared_dir, one.data)


def resumed(config: RunConfig, before: Stages, now: Stages, step: int) -> None:
    state, run = train_state(open_run(staged(config, before)), step=step), open_run(staged(config, now))
    continued(run, TrainState.from_json(json.loads(json.dumps(state.to_json()))))


@pytest.mark.parametrize(
    ("before", "now", "step"),
    [
        ([], STAGES, 3),
        (STAGES, [], 3),
        (STAGES, STAGES[:1], 8),
        (STAGES, [STAGES[0], {"step": 7, WIKI: 3}], 6),
        (STAGES, STAGES, 12),
        (STAGES, [{"step": 4, WIKI: 2, CODE: 10, PACKS: 4}, STAGES[1]], 12),
        ([], [{"step": 2, "optimizer.learning_rate": 1e-4}, {"step": 3, PACKS_AT_ONCE: 4}], 12),
        (STAGES, [{"step": 2, WIKI: 2, CODE: 2}, {**STAGES[0], WIKI: 1}, STAGES[1]], 12),
    ],
)
def test_stages_of_later_steps_may_be_edited(config: RunConfig, before: Stages, now: Stages, step: int):
    resumed(config, before, now, step)
    assert open_run(staged(config, before)).fingerprint(step) == open_run(staged(config, now)).fingerprint(step)


@pytest.mark.parametrize(
    ("before", "now", "steps", "told"),
    [
        ([], STAGES, (4, 4), "none -> steps of 4 by the weights wiki 1, code 5"),
        (STAGES, STAGES[:1], (9, 9), "steps of 4 by the weights wiki 1, code 9 -> none"),
        (STAGES, [{**STAGES[0], CODE: 6}, STAGES[1]], (6, 4), "wiki 1, code 5 -> .* wiki 1, code 6"),
        (STAGES, [{**STAGES[0], "step": 5}, STAGES[1]], (6, 4), "wiki 1, code 5 -> none"),
        (STAGES, [{**STAGES[0], PACKS: 16}, STAGES[1]], (12, 4), "steps of 4 by .* -> steps of 16 by"),
    ],
)
def test_stages_of_steps_that_are_done_may_not(
    config: RunConfig, before: Stages, now: Stages, steps: tuple[int, int], told: str
):
    step, first = steps
    with pytest.raises(CheckpointError, match=f"(?s)step {step} is reached.*step {first} would be the first.*{told}"):
        resumed(config, before, now, step)
    assert open_run(staged(config, before)).fingerprint(step) != open_run(staged(config, now)).fingerprint(step)


def test_a_source_is_numbered_when_a_stage_first_draws_it(config: RunConfig):
    """So that one which joins later, wherever the run file names it, changes no step before."""
    alone = changed(config, data={"sources": {"code": config.data.sources["code"]}})
    sources = {"wiki": {**config.data.sources["wiki"].model_dump(), "weight": 0}, "code": config.data.sources["code"]}
    joins = changed(config, data={"sources": sources}, stages=[{"step": 5, WIKI: 3}])
    assert list(joins.data.sources) == ["code", "wiki"]
    assert list(staged(config, STAGES).data.sources) == ["wiki", "code"]
    assert [tuple(one.data.sources) for _, one in joins.staged()] == [("code", "wiki")] * 2
    hashes = [open_where(joins).step(step).order_hash for step in range(1, 7)]
    first = MicroBatchDataset(open_run(alone).prepared, settings_of(alone))
    assert hashes[:4] == [f"{order_hash(first.planner.plan(step).packs):016x}" for step in range(4)]
    assert hashes[4] != f"{order_hash(first.planner.plan(4).packs):016x}"


def settings_of(config: RunConfig) -> PipelineSettings:
    return open_run(config).pipeline_settings(World(rank=0, size=1, local_rank=0, device=torch.device("cpu")))


def test_each_stage_is_planned_and_checked_with_the_ranks(config: RunConfig):
    run = staged(
        config,
        [{"step": 4, PACKS: 16, "training.packs_per_micro_batch": 4}, {"step": 9, "optimizer.learning_rate": 1e-4}],
    )
    plan = plan_training(run, ranks=4)
    assert [(one.first_step, one.last_step) for one in plan.stages] == [(1, 3), (4, 8), (9, STEPS)]
    assert [(one.step.items, one.step.micro_batches) for one in plan.stages] == [(8, 1), (16, 1), (16, 1)]
    assert [one.learning_rate for one in plan.stages] == [3e-3, 3e-3, 1e-4]
    assert plan.memory == plan.stages[1].memory != plan.stages[0].memory
    assert plan.cost.sequences == pytest.approx((3 * 8 + 9 * 16) * plan.data.packing_factor)
    assert list(plan_shown(plan))
    with pytest.raises(ConfigError, match=r"the stage of step 4: 8 ranks x training.packs_per_micro_batch \(2\)"):
        plan_training(staged(config, [{"step": 4, PACKS: 8}], packs_per_step=16), ranks=8)


def test_what_is_shown_before_the_run_is_what_it_draws(config: RunConfig):
    config = staged(config, STAGES)
    where, run = open_where(config), open_run(config)
    drawn = {"wiki": 0, "code": 0}
    for step in range(1, STEPS + 1):
        for name in {(one.source, one.pack): one.source for one in where.step(step).sequences}.values():
            drawn[name] += 1
        packs = {source.name: source.packed.plan.packs for source in where.sources}
        assert run.epochs(step) == {name: drawn[name] / packs[name] for name in drawn}
    epochs = {one.source: one.epochs for one in plan_training(config, ranks=1).data.sources}
    assert drawn["code"] > sum(drawn.values()) / 2
    assert sum(drawn.values()) == 3 * 8 + 9 * 4
    for name, count in drawn.items():
        assert epochs[name] == pytest.approx(count / packs[name])


def test_a_source_that_holds_nothing_out_is_reported_when_it_is_prepared(tmp_path: Path):
    texts = {"many": [text[:40] for text in sentences(80, seed=1)], "few": ["a single document"]}
    config = run_config(
        run_values("gpt2", tmp_path, data={"sources": text_sources(tmp_path, texts), "validation_fraction": 0.1})
    )
    recorder = Recorder()
    prepare(config.data, config.prepared_dir, progress=recorder)
    assert [note for note in recorder.notes if note.startswith("warning: source 'few' holds nothing out")]
    assert not [note for note in recorder.notes if "'many' holds" in note]
