"""Training on stored masks: every rank reads them, counts them in its plan alone, and resumes with them."""

from typing import Any

import numpy as np
import pytest
from forked_ranks import run_ranks
from pair_sources import pair_run
from step_shapes import step_shape
from tiny_training import changed, records, train_all

from evenpack.data.order.step_plan import StepPlanner
from evenpack.data.prepare.prepare import prepare
from evenpack.data.prepared import PreparedData, packed_sources
from evenpack.data.sequences import MaskedPairsView
from evenpack.engine.config import RunConfig
from evenpack.engine.resolving.resolve import resolve

STEPS = 4
EXACT = ("step", "loss", "token_loss", "next_sentence_loss", "accuracy", "gradient_norm", "targets", "order_hash")


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


def run_of(config: RunConfig, name: str, **sections: dict[str, Any]) -> RunConfig:
    return changed(config, run={"output_dir": config.prepared_dir.parent / name}, **sections)


def stored_counts(config: RunConfig) -> list[int]:
    """Returns the counts of each step, summed from the column."""
    prepared = PreparedData.open(config.prepared_dir, config.data)
    sources = packed_sources(prepared, "train", seed=config.run.seed)
    planner = StepPlanner(
        sources,
        prepared.weights,
        shape=step_shape(items_per_step=8),
        ranks=1,
        objective=resolve(config, prepared).objective,
    )
    counts = []
    for step in range(STEPS):
        packs = planner.plan(step).packs
        total = 0
        for source, sequence in zip(
            np.repeat(packs.sources, np.diff(packs.offsets)), packs.sequence_ids.tolist(), strict=True
        ):
            view = sources[source].view
            assert isinstance(view, MaskedPairsView)
            total += int(view.mask_offsets[sequence + 1] - view.mask_offsets[sequence])
        counts.append(total)
    return counts


def test_ranks_layouts_and_resume_leave_the_step_as_it_is(config: RunConfig) -> None:
    without_dropout = {"model": {"dropout": 0.0}}
    one = run_of(config, "one", **without_dropout)
    two = run_of(config, "two", **without_dropout)
    padded = run_of(config, "padded", **without_dropout, training={"layout": "padded", "packs_per_micro_batch": 4})
    straight = run_of(config, "straight")
    stopped = run_of(config, "stopped", training={"stop_after_steps": 2})
    run_ranks(train_all, 1, [one])
    run_ranks(train_all, 2, [two, padded, straight, stopped])
    expected = records(one)
    assert [record["targets"] for record in expected] == stored_counts(config)
    for other in (two, padded):
        for found, wanted in zip(records(other), expected, strict=True):
            assert found["order_hash"] == wanted["order_hash"]
            assert found["targets"] == wanted["targets"]
            assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
            assert found["gradient_norm"] == pytest.approx(wanted["gradient_norm"], rel=1e-4)
    assert [record["step"] for record in records(stopped)] == [1, 2]
    run_ranks(train_all, 2, [changed(stopped, training={"stop_after_steps": None})])
    assert [[record[name] for name in EXACT] for record in records(stopped)] == [
        [record[name] for name in EXACT] for record in records(straight)
    ]
    assert len(records(straight)) == STEPS
