"""Training on stored masks: every rank reads them, counts them in its plan alone, and resumes with them."""

import pytest
from forked_ranks import run_ranks
from pair_sources import pair_run
from tiny_training import beside, changed, exact, records, train_all

from evenpack.data.prepare.prepare import prepare
from evenpack.engine.config import RunConfig

STEPS = 4


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    recipe = {
        "kind": "sentence_pairs",
        "max_sequence_length": 48,
        "duplication_factor": 1,
        "static_masks": {"share": 0.3, "max_predictions": 9},
    }
    config = pair_run(tmp_path_factory.mktemp("pairs"), data={"recipe": recipe}, model={"dropout": 0.1})
    prepare(config.data, config.prepared_dir)
    return config


@pytest.mark.slow
def test_ranks_layouts_and_resume_leave_the_step_as_it_is(config: RunConfig) -> None:
    without_dropout = {"model": {"dropout": 0.0}}
    one = beside(config, "one", **without_dropout)
    two = beside(config, "two", **without_dropout)
    padded = beside(config, "padded", **without_dropout, training={"layout": "padded", "packs_per_micro_batch": 4})
    straight = beside(config, "straight")
    stopped = beside(config, "stopped", training={"stop_after_steps": 2})
    run_ranks(train_all, 1, [one])
    run_ranks(train_all, 2, [two, padded, straight, stopped])
    expected = records(one)
    assert len({record["targets"] for record in expected}) > 1, "sequences have other numbers of masks"
    for other in (two, padded):
        for found, wanted in zip(records(other), expected, strict=True):
            assert found["order_hash"] == wanted["order_hash"]
            assert found["targets"] == wanted["targets"]
            assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
            assert found["gradient_norm"] == pytest.approx(wanted["gradient_norm"], rel=1e-4)
    assert [record["step"] for record in records(stopped)] == [1, 2]
    run_ranks(train_all, 2, [changed(stopped, training={"stop_after_steps": None})])
    assert exact(stopped) == exact(straight)
    assert len(records(straight)) == STEPS
