"""Cost models of simulations: estimates, measured ones, and invalid ones."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evenpack.errors import ConfigError
from evenpack.models.bert.config import BertConfig
from evenpack.models.cost import Work, step_flops
from evenpack.models.gpt2.config import Gpt2Config
from evenpack.studies.imbalance.step_cost import SHIPPED, find_cost, shipped_costs


@pytest.mark.parametrize(
    ("name", "config", "rows"),
    [
        ("bert_large_estimate", BertConfig(kind="bert", preset="large"), 0.15),
        ("gpt2_xl_estimate", Gpt2Config(kind="gpt2", preset="xl"), 1.0),
    ],
)
def test_estimates_are_slower_than_the_models_operations_at_the_peak(
    name: str, config: BertConfig | Gpt2Config, rows: float
) -> None:
    vocabulary = 50_257 if config.kind == "gpt2" else 30_522

    def at_peak(slots: int, squared_lengths: int) -> float:
        work = Work(slots=slots, squared_lengths=squared_lengths, head_slots=round(rows * slots), sequences=0)
        return step_flops(config, vocabulary_size=vocabulary, work=work) / 989.4e12

    found = find_cost(name)
    assert found.causal == (config.kind == "gpt2")
    assert found.estimated
    assert found.origin.startswith("ESTIMATE, not measured")
    assert 1.2 < found.per_slot / (at_peak(1000, 0) / 1000) < 2.5
    assert 5.0 < found.per_squared_length / (at_peak(0, 1000) / 1000) < 6.0  # attention at 180 TFLOP/s, and more a slot
    assert 1e-3 < found.constant < 0.02
    assert 5e-3 < found.per_step < 0.05


def test_every_shipped_cost_model_can_be_read() -> None:
    assert {"bert_large_estimate", "gpt2_xl_estimate"} <= set(shipped_costs())
    for name in shipped_costs():
        assert find_cost(name).per_slot > 0


def test_a_cost_model_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"neither a file nor a shipped one; .*bert_large_estimate"):
        find_cost("bert_large")
    path = tmp_path / "cost.json"
    for text, message in (
        ("{", "not a readable JSON file"),
        ("[1]", "expected a JSON object, found list"),
        ('{"device": "h100"}', "head_share"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            find_cost(str(path))


def test_a_measured_cost_model_by_which_nothing_takes_time_is_refused(tmp_path: Path) -> None:
    values = json.loads((SHIPPED / "bert_large_width_cpu.json").read_text())
    terms = ("constant", "per_slot", "per_squared_length", "per_segment")
    path = tmp_path / "cost.json"
    path.write_text(json.dumps(values | dict.fromkeys(terms, 0.0)))
    with pytest.raises(ConfigError, match=r"cost\.json: constant, per_slot, .* are all 0"):
        find_cost(str(path))
    for term in terms:
        path.write_text(json.dumps(values | dict.fromkeys(terms, 0.0) | {term: 1e-6}))
        assert find_cost(str(path)).name == "cost"


@pytest.mark.parametrize(("model", "causal"), [("bert large", False), ("another decoder", True)])
def test_a_measured_cost_model_has_weights_origin_and_kind_of_attention(
    model: str, causal: bool, tmp_path: Path
) -> None:
    values: dict[str, Any] = {
        "constant": 0.5,
        "per_slot": 0.25,
        "per_squared_length": 0.125,
        "per_segment": 2.0,
        "per_step": 3.0,
        "noise": 0.1,
        "repeat_noise": None,
        "held_out_median_error": 0.02,
        "held_out_95_percent_error": 0.05,
        "samples": 40,
        "measured_on": {
            "device": "a device",
            "family": model.split(maxsplit=1)[0],
            "model": model,
            "causal": causal,
            "layers": 2,
            "hidden_size": 64,
            "vocabulary_size": 100,
            "rows_per_micro_batch": 4,
            "layouts": ["packed"],
            "precision": "fp32",
            "attention": "auto",
            "evenpack": "0",
            "torch": "2",
            "commit": None,
            "date": "2026-01-02T03:04:05",
        },
    }
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(values))
    found = find_cost(str(path))
    assert (found.name, found.estimated, found.causal) == ("mine", False, causal)
    for word in ("measured: " + model, "2 layers, width 64, 4 rows per micro-batch", "a device, 2026-01-02", "2.0 %"):
        assert word in found.origin
    one, two = np.array([1]), np.array([2])
    assert found.seconds(10 * one, 100 * one, two).tolist() == [0.5 + 2.5 + 12.5 + 4.0]
    assert found.per_step == 3.0
