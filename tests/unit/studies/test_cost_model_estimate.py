"""Estimated seconds are near the steps that were measured, linear in the operations, and refused for other devices."""

import json
from pathlib import Path
from typing import Any

import pytest

from evenpack.config import validate
from evenpack.engine.optimizers.config import AdamWSection, LambSection
from evenpack.engine.resolving.cost_model import LinearSeconds
from evenpack.errors import ConfigError
from evenpack.models.cost import PASSES, model_products
from evenpack.models.families import find_family
from evenpack.studies.cost_model_estimate import RATES, linear_seconds

RESULTS = Path(__file__).parents[3] / "benchmarks/results"
ADAMW, LAMB = AdamWSection(learning_rate=1e-4), LambSection(kind="lamb", learning_rate=1e-4)


def estimated(kind: str, preset: str, *, rows: float = 1.0, device: str = "h100", **model: Any) -> LinearSeconds:
    config = validate({"kind": kind, "preset": preset, **model}, find_family(kind).config, origin="a test")
    return linear_seconds(
        config,
        vocabulary_size=30_522 if kind == "bert" else 50_257,
        max_positions=1024,
        head_share=rows,
        optimizer=LAMB if kind == "bert" else ADAMW,
        device=device,
    )


@pytest.mark.parametrize(
    ("file", "key", "model", "squares_per_slot"),
    [
        ("A", "bert_large_phase2_sprint", ("bert", "large"), 393),
        ("A_whole_tiles", "gpt2_small", ("gpt2", "small"), 660),
    ],
)
def test_the_steps_that_the_rates_are_from_take_as_long_as_they_were_measured(
    file: str, key: str, model: tuple[str, str], squares_per_slot: int
) -> None:
    results = json.loads((RESULTS / f"h100_2026-11-27_{file}.json").read_text())["results"]
    step = results[f"throughput_{key}_compiled"]
    slots, micro_batches = (
        step["rows_per_step"] * step["pack_length"],
        step["rows_per_step"] // step["rows_per_micro_batch"],
    )
    measured = step["layouts"][0]["step_seconds"]["median"]
    found = estimated(*model, rows=0.15 if model[0] == "bert" else 1.0)
    linear = found.per_slot + squares_per_slot * found.per_squared_length
    seconds = micro_batches * found.constant + slots * linear + found.per_step
    assert seconds == pytest.approx(measured, rel=0.03)


def test_attention_costs_its_operations_within_each_window_and_half_of_them_where_it_is_causal() -> None:
    rate = RATES["h100"].attention
    bert = validate({"kind": "bert", "preset": "large"}, find_family("bert").config, origin="a test")
    (operations,) = model_products(bert, vocabulary_size=30_522).attention.values()
    assert estimated("bert", "large").per_squared_length == pytest.approx(PASSES * operations / rate)
    causal = estimated("gpt2", "xl")
    assert causal.per_squared_length == pytest.approx(PASSES * 4 * 48 * 1600 / 2 / rate)
    assert causal.per_pair_within == {}
    windows = estimated("modernbert", "base")
    assert set(windows.per_pair_within)
    assert all(windows.per_pair_within.values())
    whole = windows.per_squared_length + sum(windows.per_pair_within.values())
    assert whole == pytest.approx(PASSES * 4 * 22 * 768 / rate)


def test_the_head_costs_its_products_and_logits_where_a_loss_is_taken() -> None:
    rates = RATES["h100"]
    more, less = estimated("gpt2", "small"), estimated("gpt2", "small", rows=0.5)
    of_a_row = PASSES * 2 * 768 * 50_257 / rates.products + 50_257 * rates.loss
    assert more.per_slot - less.per_slot == pytest.approx(of_a_row / 2)
    assert (more.constant, more.per_step) == (less.constant, less.per_step)


@pytest.mark.parametrize("device", ["b200", "a100-80gb", "h200"])
def test_a_device_without_measured_rates_is_refused_by_name(device: str) -> None:
    with pytest.raises(ConfigError, match=rf"on h100 with adamw, lamb, and none were on {device} with adamw: measure"):
        estimated("gpt2", "small", device=device)
