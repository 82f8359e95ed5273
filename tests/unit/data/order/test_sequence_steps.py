"""A prepared run in steps of single sequences: its plan, and its validation."""

from typing import Any

import numpy as np
import pytest
import torch
from pair_sources import pair_run
from step_shapes import step_shape

from evenpack.config import validate
from evenpack.data.order.step_plan import StepPlanner
from evenpack.data.prepare.prepare import prepare
from evenpack.data.prepared import PreparedData, packed_sources
from evenpack.engine.build import build_model
from evenpack.engine.config import RunConfig
from evenpack.engine.evaluate import evaluate_model, evaluations_to_json
from evenpack.engine.resolving.resolve import open_run, resolve
from evenpack.engine.world.distributed import World
from evenpack.launcher.planning import plan_training
from evenpack.studies.plan.presentation import step_rows

PER_STEP = 24


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """Prepares a BERT run in steps of packs."""
    config = pair_run(tmp_path_factory.mktemp("pairs"))
    prepare(config.data, config.prepared_dir)
    return config


def of_sequences(config: RunConfig, layout: str) -> RunConfig:
    training: dict[str, Any] = {
        "batching": "sequences",
        "layout": layout,
        "packs_per_step": None,
        "packs_per_micro_batch": None,
        "sequences_per_step": PER_STEP,
        "sequences_per_micro_batch": 6,
    }
    values = config.model_dump()
    return validate({**values, "training": values["training"] | training}, RunConfig, origin="test")


def test_validation_is_the_same_whatever_a_step_counts(packs: RunConfig) -> None:
    run = open_run(packs)
    data = run.prepared
    world = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
    model = build_model(run, world.device)
    expected = evaluations_to_json(data, evaluate_model(model, run, world))
    for layout in ("unpadded", "padded"):
        found = evaluations_to_json(data, evaluate_model(model, resolve(of_sequences(packs, layout), data), world))
        for source, values in expected.items():
            assert values is not None
            assert found[source] == pytest.approx(values, rel=1e-5)


def test_the_plan_counts_sequences(packs: RunConfig) -> None:
    config = of_sequences(packs, "padded")
    plan = plan_training(config, ranks=2)
    assert (plan.step.items, plan.step.batching, plan.step.assignment) == (PER_STEP, "sequences", "arrival")
    assert plan.step.slots == PER_STEP * 48
    assert plan_training(of_sequences(packs, "unpadded"), ranks=2).step.slots is None, "as many as its sequences need"
    assert plan.data.packing_factor == 1.0
    data = PreparedData.open(config.prepared_dir, config.data)
    sources = packed_sources(data, "train", seed=1, batching="sequences")
    assert plan.data.sources[0].epochs == pytest.approx(4 * PER_STEP * 2 / 3 / sources[0].view.count)
    means = [source.view.lengths().mean() for source in sources]
    assert plan.step.tokens == pytest.approx(PER_STEP * (2 * means[0] + means[1]) / 3)
    assert plan.data.packing_efficiency == pytest.approx(plan.step.tokens / plan.step.slots)
    assert step_rows(plan.step)["step"] == "24 sequences = 2 ranks x 2 (gradient accumulation) x 6 sequences"


def test_expected_denominators_are_what_steps_of_sequences_hold_on_average(packs: RunConfig) -> None:
    values = of_sequences(packs, "unpadded").model_dump()
    config = validate({**values, "model": values["model"] | {"loss_balancing": "expected"}}, RunConfig, origin="test")
    data = PreparedData.open(config.prepared_dir, config.data)
    planner = StepPlanner(
        packed_sources(data, "train", seed=1, batching="sequences"),
        data.weights,
        shape=step_shape(items_per_step=PER_STEP),
        ranks=1,
        objective=resolve(config, data).objective,
    )
    steps = [planner.plan(step).counts for step in range(100)]
    expected = resolve(config, data).denominators(steps[0])
    assert expected["next_sentence"] == pytest.approx(PER_STEP, rel=1e-12)
    # Masked tokens are rounded to whole ones in each sequence, and in the full row that the estimate goes by.
    assert np.mean([step.targets for step in steps]) == pytest.approx(expected["masked_token"], rel=0.05)
