"""The committed sweep of transformers: every type is in it, the proof agrees with the oracle, and both do so again."""

import json
import random
import sys
from dataclasses import replace
from typing import Any

import pytest
import transformers
from repository import ROOT

from evenpack.adapters.isolation import find_isolation

sys.path.insert(0, str(ROOT / "benchmarks"))

import isolation_of_transformers as sweep

(COMMITTED,) = (ROOT / "benchmarks/results").glob("isolation_of_transformers_cpu_*.json")
REPORT = json.loads(COMMITTED.read_text())
ROWS = {(row["task"], row["type"]): row for row in REPORT["rows"]}
DRAWN = sorted(random.Random(46).sample(sorted(ROWS), 20))


def verdicts(row: sweep.Row) -> tuple[Any, ...]:
    return tuple((row[attention]["verdict"], row[attention].get("first_position")) for attention in sweep.ATTENTION)


def test_every_language_model_of_the_installed_transformers_is_in_the_sweep() -> None:
    assert REPORT["versions"]["transformers"] == transformers.__version__, "run benchmarks/isolation_of_transformers.py"
    assert set(ROWS) == set(sweep.models())
    assert REPORT["counts"] == sweep.counts_of(REPORT["rows"])


def test_no_verdict_contradicts_documents_alone() -> None:
    assert [line for row in ROWS.values() for line in sweep.disagreements(row)] == []


def test_a_contradiction_is_seen() -> None:
    """In both directions, and where the oracle itself fails."""
    llama = {"verdict": "isolated, no mask", "loss": 1e-8, "token": 1e-7}
    leak = {"verdict": "refused", "loss": 1e-3, "token": 0.1, "problem": "leaks"}
    for wrong in (
        llama | {"loss": 1e-4},
        llama | {"token": 1e-3},
        llama | {"verdict": "refused"},
        {"verdict": llama["verdict"], "fails": "x"},
    ):
        assert sweep.disagreements({"sdpa": llama, "eager": wrong})
    assert not sweep.disagreements({"sdpa": llama, "eager": leak})


@pytest.mark.parametrize(("task", "model_type"), [("causal", "opt"), ("masked", "roberta"), ("masked", "modernbert")])
def test_the_oracle_sees_inputs_that_let_sequences_mix_and_positions_that_are_off(task: str, model_type: str) -> None:
    model, is_causal = sweep.built(task, model_type, "sdpa"), task == "causal"
    inputs = find_isolation(model, causal=is_causal, max_sequence_length=32, slots=64, own_loss=is_causal).inputs
    assert inputs is not None
    assert inputs.mask == "block"
    wrong = [replace(inputs, mask="none"), replace(inputs, first_position=inputs.first_position + 3)]
    for given in (inputs, *wrong[: 2 if model_type != "modernbert" else 1]):  # whose positions are but distances
        found = {"verdict": "isolated, block mask", **sweep.oracle(model, given)}
        assert bool(sweep.disagreements(dict.fromkeys(sweep.ATTENTION, found))) == (given is not inputs)


@pytest.mark.parametrize(
    ("task", "model_type"),
    [("causal", "llama"), ("causal", "mamba"), ("causal", "doge"), ("causal", "llama4_text"), ("masked", "mpnet")],
)
def test_a_row_is_found_again(task: str, model_type: str) -> None:
    assert verdicts(sweep.row_of(task, model_type)) == verdicts(ROWS[task, model_type])


@pytest.mark.slow
@pytest.mark.parametrize(("task", "model_type"), DRAWN)
def test_twenty_rows_that_are_drawn_are_found_again(task: str, model_type: str) -> None:
    row = sweep.row_of(task, model_type)
    assert sweep.disagreements(row) == []
    assert verdicts(row) == verdicts(ROWS[task, model_type])
