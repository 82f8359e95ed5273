"""Steps that are not finite: the run ends, or leaves them out as if the run file named them; and what is written."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import run_ranks
from slow_cases import slow_but
from tiny_training import are_equal, changed, checkpoints, never, numbered_lines, prepare_run, records, saved_everything

from evenpack.engine import engine as engine_module
from evenpack.engine.config import RunConfig
from evenpack.engine.engine import TrainingEngine
from evenpack.engine.parts import bad_steps
from evenpack.engine.reporting.definitions import find_metric, values_of
from evenpack.engine.sharding import SHARDINGS
from evenpack.engine.train import train_in
from evenpack.engine.world.distributed import World
from evenpack.errors import RunError

STEPS = 5
BAD = 4
STAGES = (0, 1, 3)
"""ZeRO 2 checks the norm by the same code as 1, and has no norms of single ranks, as 3."""


Trained = tuple[dict[str, RunConfig], dict[str, str]]
"""Runs by name, and the errors of those that end with one."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Trains at ZeRO 1 all that a run may do about such steps."""
    others = {"stopped": {}, "spike": {"report_spikes_above": 10.0}}
    skipping = {name: {"on_nan": "skip"} for name in ("in_a_row", "interrupted")}
    return trained_at([1], others | skipping, tmp_path_factory.mktemp("bad_steps"))


@pytest.fixture(scope="module")
def trained_elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Trains at the other stages what skips such steps, and what leaves them out."""
    return trained_at([stage for stage in STAGES if stage != 1], {}, tmp_path_factory.mktemp("bad_steps_elsewhere"))


def trained_at(stages: Iterable[int], others: dict[str, dict[str, Any]], folder: Path) -> Trained:
    texts = {"lines": numbered_lines()}
    config = prepare_run(folder, texts, steps=STEPS, checkpoint_every_steps=1, keep_checkpoints=STEPS)
    trainings: dict[str, tuple[int, dict[str, Any]]] = {name: (1, training) for name, training in others.items()}
    for stage in stages:
        trainings[f"named_{stage}"] = (stage, {"skip_steps": [BAD]})
        trainings[f"left_out_{stage}"] = (stage, {"on_nan": "skip"})
    runs = {
        name: changed(
            config,
            run={"output_dir": folder / name},
            optimizer={"learning_rate": 3e-3},
            deepspeed={"zero_stage": stage},
            training=training,
        )
        for name, (stage, training) in trainings.items()
    }
    errors = run_ranks(train_all, 2, runs)
    assert errors[0] == errors[1]
    return runs, errors[0]


@pytest.fixture
def trained_here(stage: int, request: pytest.FixtureRequest) -> Trained:
    """Returns the runs at this stage."""
    found: Trained = request.getfixturevalue("trained" if stage == 1 else "trained_elsewhere")
    return found


def train_all(world: World, runs: dict[str, RunConfig]) -> dict[str, str]:
    errors = {}
    whole = TrainingEngine.compute_gradients
    for name, config in runs.items():
        bad = {"in_a_row": (2, 3, 4), "interrupted": (1, 2, 4, 5)}.get(name, () if name.startswith("named") else (BAD,))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bad_steps, "_FEWEST_STEPS", 2)
            patch.setattr(bad_steps, "_MOST_IN_A_ROW", 2)
            factor = 1e4 if name == "spike" else torch.nan
            patch.setattr(TrainingEngine, "compute_gradients", spoiled(whole, bad, factor))
            try:
                train_in(world, config, stop_requested=never)
            except RunError as error:
                errors[name] = str(error)
    return errors


def spoiled(whole: Any, bad: tuple[int, ...], factor: float) -> Any:
    """Returns `compute_gradients` that multiplies the gradient and the loss of rank 1 in bad steps."""

    def compute_gradients(engine: TrainingEngine, step: int, micro_batches: Any) -> Any:
        if step + 1 not in bad or engine.world.rank != 1:
            return whole(engine, step, micro_batches)
        with pytest.MonkeyPatch.context() as patch:
            scaled = engine_module.scaled_loss
            patch.setattr(engine_module, "scaled_loss", lambda *sums, **split: factor * scaled(*sums, **split))
            loss_sums, correct, stopwatch = whole(engine, step, micro_batches)
        return {name: sums * factor for name, sums in loss_sums.items()}, correct, stopwatch

    return compute_gradients


def report(config: RunConfig, step: int = BAD) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((config.run.output_dir / "bad_steps" / f"step_{step:06d}.json").read_text())
    return values


@pytest.mark.parametrize("stage", slow_but([1], STAGES))
def test_a_step_that_is_left_out_is_one_that_the_run_file_skips(trained_here: Trained, stage: int) -> None:
    runs, errors = trained_here
    named, left_out = runs[f"named_{stage}"], runs[f"left_out_{stage}"]
    assert f"left_out_{stage}" not in errors
    for step in (BAD, STEPS):
        found = saved_everything(left_out, step)
        assert len(found) > 10
        assert are_equal(found, saved_everything(named, step))
    for mine, its in zip(records(named), records(left_out), strict=True):
        if its["step"] == BAD:
            assert {find_metric(path).name for path, _ in values_of(its)} >= {"skipped/not_finite", "skipped/packs"}
            assert its["skipped"].pop("not_finite") == 1
        exact = ("step", "loss", "learning_rate", "gradient_norm", "samples", "order_hash", "skipped")
        assert [mine.get(name) for name in exact] == [its.get(name) for name in exact]
    summary = json.loads((left_out.run.output_dir / "summary.json").read_text())
    assert (summary["skipped"]["steps"], summary["skipped"]["not_finite"]) == (1, 1)


@pytest.mark.parametrize("stage", slow_but([1], STAGES))
def test_the_report_has_each_ranks_norm_and_the_documents(trained_here: Trained, stage: int) -> None:
    runs, _ = trained_here
    found = report(runs[f"left_out_{stage}"])
    assert (found["reason"], found["goes_on"], found["loss"]) == ("not finite", True, "nan")
    good, bad = found["ranks"]
    if SHARDINGS[stage].balances_each_micro_batch:
        assert [good["gradient_norm"], bad["gradient_norm"]] == [None, None], "no rank has a gradient of its own"
    else:
        assert 0.0 < good["gradient_norm"] < 1e3
        assert bad["gradient_norm"] == "nan"
    assert all(loss == "nan" for one in bad["micro_batches"] for loss in one["loss_sums"].values())
    ids = sorted(one for rank in found["ranks"] for micro in rank["micro_batches"] for one in micro["sequence_ids"])
    placed = found["content"]["sequences"]
    assert ids == sorted(one["sequence"] for one in placed)
    assert all(part["tokens"] > 0 for one in placed for part in one["parts"])


def test_a_run_ends_at_such_a_step_unless_told_otherwise(trained: Trained) -> None:
    runs, errors = trained
    message, output_dir = errors["stopped"], runs["stopped"].run.output_dir
    assert message.startswith(f"step {BAD}: loss nan, gradient norm ")
    assert "; not finite on rank 1 on " in message
    assert [one["step"] for one in records(runs["stopped"])] == [1, 2, 3]
    assert not report(runs["stopped"])["goes_on"]
    assert checkpoints(output_dir)[-1] == "step_000003"
    assert not (output_dir / "summary.json").exists()


def test_too_many_in_a_row_end_the_run_and_a_finite_one_begins_the_count_again(
    trained: Trained,
) -> None:
    runs, errors = trained
    assert errors["in_a_row"].startswith("step 4: loss nan")
    assert "3 steps in a row are not finite: the weights" in errors["in_a_row"]
    assert [report(runs["in_a_row"], step)["goes_on"] for step in (2, 3, 4)] == [True, True, False]
    assert "interrupted" not in errors
    assert [one["step"] for one in records(runs["interrupted"])] == [1, 2, 3, 4, 5]
    assert all(report(runs["interrupted"], step)["goes_on"] for step in (1, 2, 4, 5))


def test_a_spike_is_reported_and_trained_on(trained: Trained) -> None:
    config = trained[0]["spike"]
    assert [path.name for path in (config.run.output_dir / "bad_steps").iterdir()] == [f"step_{BAD:06d}.json"]
    found = report(config)
    assert found["reason"] == "spike"
    assert found["gradient_norm"] > 10 * found["median_gradient_norm"] > 0
    assert found["ranks"][1]["gradient_norm"] > 10 * found["ranks"][0]["gradient_norm"]
    assert [one["step"] for one in records(config) if "skipped" in one] == []
