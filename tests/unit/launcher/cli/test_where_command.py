"""`evenpack where`: tables for people, one document for programs, and messages for invalid queries."""

import json
from pathlib import Path

import pytest
from prepared_files import sentences
from run_files import prepared, run_config, run_values, text_sources, write_run_file
from typer.testing import CliRunner

from evenpack.errors import ConfigError, NotPreparedError
from evenpack.launcher.cli.app import app


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("where")
    values = run_values("gpt2", folder, data={"sources": text_sources(folder, {"wiki": sentences(20, seed=3)})})
    prepared(run_config(values))
    return write_run_file(folder / "run.yaml", values)


def asked(run_file: Path, *arguments: str) -> str:
    result = CliRunner().invoke(app, ["where", str(run_file), *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_step_and_its_documents_are_one_story(run_file: Path) -> None:
    step = json.loads(asked(run_file, "--step", "2", "--text", "--json"))
    assert (step["step"], step["packs"], step["skipped"]) == (2, 8, False)
    one = step["sequences"][0]
    (part,) = one["parts"]
    found = json.loads(asked(run_file, "--document", str(part["document"]), "--source", "wiki", "--json"))
    places = [(visit["step"], visit["pack"], visit["slot"], visit["start"]) for visit in found["visits"]]
    assert (2, one["pack"], one["slot"], part["start"]) in places
    assert found["text"] is None
    assert part["text"]
    shown = asked(run_file, "--step", "2")
    assert shown.startswith(f"Step 2: 8 packs, {len(step['sequences'])} sequences")
    assert step["order_hash"] in shown
    assert f"Document {part['document']} of wiki" in asked(run_file, "--document", str(part["document"]))


def test_a_step_that_was_trained_on_other_data_ends_in_an_error(run_file: Path) -> None:
    output_dir = run_file.parent / "other"
    output_dir.mkdir()
    (output_dir / "metrics.jsonl").write_text('{"step": 2, "order_hash": "0000000000000001"}\n')
    override = f"run.output_dir={output_dir}"
    result = CliRunner().invoke(app, ["where", str(run_file), override, "--step", "2"])
    assert result.exit_code == 2
    assert result.stdout.startswith("Step 2")
    assert "has step 2 with order hash 0000000000000001" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "error", "told"),
    [
        ([], ConfigError, "give one of the two options: --step N, or --document ID"),
        (["--step", "1", "--source", "wiki"], ConfigError, "leave --source wiki out"),
        (["--step", "7"], ConfigError, "step 7 is not in this run, whose steps are 1 to 6"),
        (["--document", "20"], ConfigError, "documents 0 to 19"),
        (["data.prepared_dir=nowhere", "--step", "1"], NotPreparedError, "has not been prepared"),
    ],
)
def test_invalid_queries_are_reported(run_file: Path, arguments: list[str], error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        CliRunner().invoke(app, ["where", str(run_file), *arguments], catch_exceptions=False)
