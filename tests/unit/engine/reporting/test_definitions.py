"""The list of metrics, and the values of a record that trackers receive."""

import runpy

import pytest
from repository import ROOT

from evenpack.engine.reporting.definitions import DEFINITIONS, find_metric, scalars


def test_the_documentation_has_the_definitions_as_they_are() -> None:
    text = (ROOT / "docs/metrics.md").read_text("utf-8")
    tables = runpy.run_path(str(ROOT / "scripts/write_metrics_tables.py"))["metrics_tables"]()
    assert text.endswith(tables), "it is stale: run `python scripts/write_metrics_tables.py`"


def test_each_name_is_defined_once_and_has_a_meaning() -> None:
    names = [metric.name for metric in DEFINITIONS]
    assert sorted(set(names)) == sorted(names)
    assert all(metric.meaning for metric in DEFINITIONS)


def test_a_name_with_a_source_stands_for_each_source() -> None:
    assert find_metric(("validation", "wiki", "loss")).name == "validation/SOURCE/loss"
    assert find_metric(("source_tokens", "a/b")).unit == "tokens"


@pytest.mark.parametrize("path", [("looss",), ("validation", "wiki"), ("validation", "wiki", "loss", "more")])
def test_a_name_that_is_not_defined_is_refused(path: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=f"'{'/'.join(path)}' is not a metric"):
        find_metric(path)


def test_trackers_get_each_single_number_under_its_group() -> None:
    record = {
        "step": 7,
        "loss": None,
        "tokens": 12,
        "order_hash": "0f",
        "source_tokens": {"wiki": 8, "code": 4},
        "validation": {"wiki": {"loss": 2.5}, "code": None},
        "ranks": {"steps": 3, "tokens": [6, 6]},
    }
    assert scalars(record) == {
        "data/tokens": 12,
        "data/source_tokens/wiki": 8,
        "data/source_tokens/code": 4,
        "validation/wiki/loss": 2.5,
    }
    with pytest.raises(ValueError, match="'validation/wiki/surprise' is not a metric"):
        scalars({"step": 1, "validation": {"wiki": {"surprise": 1.0}}})
