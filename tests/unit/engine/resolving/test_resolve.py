"""Resolving a run file and its prepared data, and the costs by which items are assigned."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_run import tiny_gpt2_run
from windowed_models import layers_with_windows, with_windows

import evenpack
from evenpack.data.order.step_plan import PackStatistics, item_costs
from evenpack.data.order.step_shape import CostWeights
from evenpack.engine.build import build_at, find_start
from evenpack.engine.config import RunConfig
from evenpack.engine.resolving.cost_model import CostModel
from evenpack.engine.resolving.cost_weights import operation_weights
from evenpack.engine.resolving.resolve import open_run
from evenpack.engine.sharding import SHARDINGS
from evenpack.engine.train import train_in
from evenpack.engine.world.distributed import World
from evenpack.errors import ConfigError
from evenpack.studies.throughput.contenders import changed

SHIPPED = Path(evenpack.__file__).parent / "studies" / "imbalance" / "cost_models"
SQUARES = CostWeights(per_token=0.0, per_squared_length=1.0, per_segment=0.0)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return tiny_gpt2_run(tmp_path_factory.mktemp("run"))


def write_cost_model(folder: Path, **changes: Any) -> Path:
    """Writes a cost model of three terms that was measured on a GPT-2."""
    values = json.loads((SHIPPED / "gpt2_xl_width_cpu.json").read_text())
    values |= {"per_slot": 2e-6, "per_squared_length": 3e-9, "per_segment": 4e-5}
    values["measured_on"] |= changes
    path = folder / "cost.json"
    path.write_text(json.dumps(values))
    return path


def test_the_layout_chooses_the_terms_of_a_measured_cost_model(config: RunConfig, tmp_path: Path) -> None:
    path = write_cost_model(tmp_path)
    packed = open_run(changed(config, training={"cost_model": path}))
    assert packed.shape.cost_weights == CostWeights(per_token=0.0, per_squared_length=3e-9, per_segment=4e-5)
    unpadded = open_run(changed(config, training={"cost_model": path, "layout": "unpadded"}))
    assert unpadded.shape.cost_weights == CostWeights(per_token=2e-6, per_squared_length=3e-9, per_segment=4e-5)


@pytest.mark.parametrize(
    ("sections", "evaluated"),
    [
        ({"attention": {"isolate": False}}, "packed"),
        ({"training": {"layout": "padded"}}, "unpadded"),
        ({"training": {"layout": "unpadded"}}, "unpadded"),
    ],
    ids=str,
)
def test_every_run_is_evaluated_on_isolated_sequences_without_padding(
    config: RunConfig, sections: dict[str, Any], evaluated: str
) -> None:
    run = open_run(changed(config, **sections))
    assert run.shape.isolate == ("attention" not in sections)
    assert run.evaluation_shape.isolate
    assert run.evaluation_shape.layout == evaluated


def test_without_a_cost_model_operations_decide_and_segments_cost_nothing(config: RunConfig) -> None:
    assert open_run(config).shape.cost_weights == SQUARES
    unpadded = open_run(changed(config, training={"layout": "unpadded"}))
    assert unpadded.shape.cost_weights == operation_weights(unpadded.config, unpadded.prepared)
    assert unpadded.shape.cost_weights.per_token > 0.0
    assert unpadded.shape.cost_weights.per_segment == 0.0


@pytest.mark.parametrize(
    ("measured", "message"),
    [
        ({"family": "bert", "model": "bert large"}, r"bert large, and model\.kind is gpt2"),
        ({"layouts": ["padded", "unpadded/arrival"]}, r"padded, unpadded, and training\.layout is packed"),
        (None, r"none\.json cannot be read.* set training\.cost_model=null for it"),
    ],
)
def test_a_cost_model_of_another_model_or_layout_is_refused(
    config: RunConfig, tmp_path: Path, measured: dict[str, Any] | None, message: str
) -> None:
    path = tmp_path / "none.json" if measured is None else write_cost_model(tmp_path, **measured)
    with pytest.raises(ConfigError, match=message):
        open_run(changed(config, training={"cost_model": path}))


def test_weights_with_windows_are_the_operations_of_each_kind_of_layer(config: RunConfig) -> None:
    here = config.model.shape["layers"]
    assert here % 2 == 0, "half of the layers see a window"
    prepared = open_run(config).prepared
    with layers_with_windows():
        in_layouts = {layout: changed(config, training={"layout": layout}) for layout in ("packed", "unpadded")}
        windows = {"model": with_windows(config.model, (None, 5))}
        weights = {
            layout: operation_weights(one.model_copy(update=windows), prepared) for layout, one in in_layouts.items()
        }
        full = operation_weights(in_layouts["unpadded"], prepared)
    for found in weights.values():
        assert (found.per_squared_length, found.per_pair_within, found.per_segment) == (0.5, {5: 0.5}, 0.0)
    assert weights["unpadded"].per_token == pytest.approx(full.per_token, rel=1e-12)
    assert not weights["packed"].in_layout("packed").are_zero
    assert replace(weights["packed"].in_layout("packed"), per_squared_length=0.0, per_pair_within={5: 0.0}).are_zero


@pytest.mark.parametrize("weights", [SQUARES, replace(SQUARES, per_pair_within={64: 0.1 + 0.2, 128: 1e-300})])
def test_weights_are_the_same_after_json_and_have_windows_there_only_with_some(weights: CostWeights) -> None:
    values = weights.to_json()
    assert ("per_pair_within" in values) == bool(weights.per_pair_within)
    assert CostWeights.from_json(json.loads(json.dumps(values))) == weights


def test_a_cost_model_of_other_windows_is_refused(config: RunConfig, tmp_path: Path) -> None:
    path = write_cost_model(tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"per_pair_within": {"7": 1e-9}}))
    with pytest.raises(ConfigError, match=r"has costs within windows of 7, and the layers of this gpt2 have no window"):
        open_run(changed(config, training={"cost_model": path}))
    CostModel.read(path).write(path)
    assert CostModel.read(path).cost_weights.per_pair_within == {7: 1e-9}


def test_the_cost_per_segment_counts_and_changes_who_computes_what() -> None:
    statistics = PackStatistics(
        tokens=np.array([10, 20]), squared_lengths=np.array([100, 50]), segments=np.array([1, 7]), pairs_within={}
    )
    weights = CostWeights(per_token=2.0, per_squared_length=0.5, per_segment=3.0)
    assert item_costs(weights, statistics).tolist() == [20 + 50 + 3, 40 + 25 + 21]
    assert item_costs(replace(weights, per_segment=0.0), statistics).tolist() == [70.0, 65.0]


def test_costs_are_balanced_where_the_ranks_of_a_stage_wait(config: RunConfig) -> None:
    balanced = {
        stage: open_run(changed(config, deepspeed={"zero_stage": stage})).shape.balances_each_micro_batch
        for stage in SHARDINGS
    }
    assert balanced == {0: False, 1: False, 2: True, 3: True}


def test_a_run_that_resumes_in_another_layout_assigns_by_the_weights_of_that(
    world: World, config: RunConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The weights of packs leave tokens out, but un-padded ranks wait for the one with the most tokens."""
    caplog.set_level(logging.INFO)
    course = {"steps": 2, "stop_after_steps": 1, "evaluate_every_steps": None, "loader_workers": 0}
    packed = changed(config, run={"output_dir": tmp_path}, training=course)
    train_in(world, packed, stop_requested=lambda: False)
    path = write_cost_model(tmp_path)
    start = find_start(open_run(changed(packed, training={"cost_model": path})), world)
    assert start.resolved.shape.cost_weights == SQUARES
    assert "nor cost_model in the same layout" in caplog.text
    unpadded = changed(packed, training={"layout": "unpadded"})
    weights = find_start(open_run(unpadded), world).resolved.shape.cost_weights
    assert weights == open_run(unpadded).shape.cost_weights != SQUARES
    given = changed(packed, training={"layout": "unpadded", "cost_model": path})
    assert build_at(find_start(open_run(given), world)).start.resolved.shape.cost_weights.per_token == 2e-6
    assert "training.cost_model: None ->" in caplog.text
