"""`evenpack probe` as a user types it: its table, its JSON, its exit codes."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from evenpack.errors import ConfigError
from evenpack.launcher.cli.app import app


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["probe", *arguments], catch_exceptions=False)


def test_the_table_shows_each_combination_and_the_leak_is_the_exit_code() -> None:
    done = invoke("llama", "--backend", "sdpa", "--mode", "eval")
    assert done.exit_code == 1
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("sdpa ")]
    assert [(cache, mask, line[-1]) for _, cache, mask, *line in lines] == [
        ("off", "none", "isolated"),
        ("off", "ones", "leaks"),
        ("off", "block", "isolated"),
        ("on", "none", "leaks"),
        ("on", "ones", "leaks"),
        ("on", "block", "isolated"),
    ]
    assert "Not isolated in each of these" in done.stdout


def test_the_combination_asked_for_decides_and_the_json_has_every_number(tmp_path: Path) -> None:
    saved = tmp_path / "found.json"
    words = ("modernbert", "--backend", "sdpa", "--mask", "block", "--mode", "eval", "--json", "--save", str(saved))
    done = invoke(*words)
    assert done.exit_code == 0
    value: dict[str, Any] = json.loads(done.stdout)
    assert json.loads(saved.read_text()) == value
    assert value["isolated"] is True
    assert value["kind"] == "a tiny ModernBertForMaskedLM with random weights"
    assert set(value["versions"]) == {"torch", "transformers"}
    (row,) = value["combinations"]
    assert row["combination"] == {"backend": "sdpa", "cache": None, "mask": "block", "mode": "eval"}
    assert row["verdict"] == "isolated"
    assert row["isolation"]["max_deviation"] == 0
    assert row["isolation"]["control_deviation"] > 0.1


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"lama is no path and no model type.*did you mean llama"):
        invoke("lama")
    assert invoke("llama", "--mask", "3d").exit_code == 2
