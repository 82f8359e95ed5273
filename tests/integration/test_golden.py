"""Small runs leave what they left at the commit of the record: files, steps, and the JSON of commands."""

import json
from pathlib import Path
from typing import Any

import pytest
from forked_ranks import run_ranks
from golden import (
    BATCHES,
    CASES,
    COMMANDS_OF,
    OWN_DOCUMENTS,
    RECORD,
    TOLERANCE,
    differences,
    record_batches,
    record_case,
    steps_of,
    stopped_run,
    tolerance_of,
    write_sources,
)
from integration.small_run import train_on
from slow_cases import slow_but


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return content


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == COMMANDS_OF[-1] else [pytest.mark.slow]) for name in CASES]
)
def test_a_run_leaves_what_it_left(name: str, record: dict[str, Any], tmp_path: Path) -> None:
    write_sources(tmp_path)
    found = json.loads(json.dumps(record_case(name, tmp_path)))
    lines = list(differences(record["cases"][name], found, tolerance=tolerance_of(name, record["processor"])))
    assert not lines, "\n".join(lines[:40])


OTHERS = (
    *("documents_truncated_unpadded", "documents_grid", "concat", "concat_joined", "concat_masked"),
    *("padding", "padding_joined", "padding_rows", "pairs_padded"),
)
"""Each differs in one thing from two of those that `make test` compares."""


@pytest.mark.parametrize("name", slow_but({*BATCHES, *OWN_DOCUMENTS} - {*OTHERS}, [*BATCHES, *OWN_DOCUMENTS]))
def test_batches_are_what_they_were_and_hold_what_their_plans_count(
    name: str, record: dict[str, Any], tmp_path: Path
) -> None:
    write_sources(tmp_path)
    found = record_batches(name, tmp_path)
    lines = list(differences(record["batches"][name], found, tolerance=0.0))
    assert not lines, "\n".join(lines)
    assert len({tuple(one.items()) for one in found.values()}) == len(found), "each reading differs from the others"


def test_a_run_that_was_stopped_at_the_commit_of_the_record_goes_on(record: dict[str, Any], tmp_path: Path) -> None:
    name = next(iter(CASES))
    config = stopped_run(tmp_path)
    run_ranks(train_on, 2, config)
    steps = steps_of(tmp_path / name)
    tolerance = tolerance_of(name, record["processor"])
    assert len(steps) == config.training.steps
    assert not list(differences(record["cases"][name]["steps"], steps, tolerance=tolerance))


def test_a_changed_value_is_found(record: dict[str, Any]) -> None:
    steps = record["cases"]["gpt2_packed"]["steps"]
    changed = json.loads(json.dumps(steps))
    changed[2]["order_hash"] = "0" + changed[2]["order_hash"]
    changed[3]["loss"] *= 1.001
    assert len(list(differences(steps, changed, tolerance=TOLERANCE))) == 2
