"""Cost models of simulations: estimates, measured ones, and invalid ones."""

import json
from pathlib import Path

import numpy as np
import pytest

from evenpack.errors import ConfigError
from evenpack.studies.imbalance.step_cost import SHIPPED, find_cost, shipped_costs


@pytest.mark.parametrize("name", shipped_costs())
def test_a_shipped_cost_model_says_whether_it_was_measured(name: str) -> None:
    found = find_cost(name)
    assert found.estimated == name.endswith("_estimate") == found.origin.startswith("ESTIMATE, not measured")
    assert found.per_slot > 0


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
    shipped = json.loads((SHIPPED / "bert_large_width_cpu.json").read_text())
    weights = {"constant": 0.5, "per_slot": 0.25, "per_squared_length": 0.125, "per_segment": 2.0, "per_step": 3.0}
    of_model = {"family": model.split(maxsplit=1)[0], "model": model, "causal": causal, "device": "a device"}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(shipped | weights | {"measured_on": shipped["measured_on"] | of_model}))
    found = find_cost(str(path))
    assert (found.name, found.estimated, found.causal) == ("mine", False, causal)
    for word in (f"measured: {model}", "a device, "):
        assert word in found.origin
    one, two = np.array([1]), np.array([2])
    assert found.seconds(10 * one, 100 * one, two).tolist() == [0.5 + 2.5 + 12.5 + 4.0]
    assert found.per_step == 3.0
