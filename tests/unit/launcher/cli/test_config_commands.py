"""`evenpack config list`, `explain` and `schema`, and run files that are found by name."""

import json
from pathlib import Path

import pytest
from command_line import evenpack

from evenpack.config import find_run_file, load_run_file
from evenpack.engine.config import RunConfig
from evenpack.errors import ConfigError
from evenpack.shipped import shipped_run_files
from evenpack.studies.equivalence.config import EquivalenceConfig
from evenpack.studies.runs.study_file import load_study


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_shipped_run_file_is_found_by_its_name_from_anywhere() -> None:
    for name in ("demo", "demo.yaml"):
        code, shown, _ = evenpack("config", "show", name, "training.packs_per_step=32")
        assert code == 0
        assert "packs_per_step: 32" in shown
    assert load_run_file(Path("mlperf/bert_large_packed"), RunConfig).mlperf is not None


def test_a_file_of_that_path_comes_first() -> None:
    assert find_run_file(Path("demo")) == shipped_run_files()["demo"]
    Path("demo").mkdir()
    assert find_run_file(Path("demo")) == shipped_run_files()["demo"]
    Path("demo.yaml").touch()
    assert find_run_file(Path("demo.yaml")) == Path("demo.yaml")


def test_the_runs_of_a_shipped_study_are_found_beside_it() -> None:
    study, _ = load_study(Path("studies/equivalence_mini"), EquivalenceConfig, [])
    assert all(phase.base.is_file() for phase in study.phases.values())


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("configs/gpt2_smal.yaml", "did you mean gpt2_small,"),
        ("bert_large_packed", "did you mean mlperf/bert_large_packed"),
        (".", "run file . is not a file"),
    ],
)
def test_a_run_file_that_is_nowhere_is_refused_with_the_nearest_names(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_run_file(Path(path))


def test_list_names_every_shipped_run_file_with_what_it_is() -> None:
    code, shown, _ = evenpack("config", "list")
    assert code == 0
    assert "A GPT-2 that two CPU cores can train on a Wikipedia sample." in shown
    rows = json.loads(evenpack("config", "list", "--json")[1])
    assert [row["name"] for row in rows] == list(shipped_run_files())
    assert all(Path(row["path"]).is_file() for row in rows)
    about = " ".join(row["about"] for row in rows)
    assert "configs/" not in about  # which only a checkout has
    assert "evenpack " not in about


def test_the_commands_in_shipped_files_name_them_as_they_are_found_anywhere() -> None:
    for name, path in shipped_run_files().items():
        comment = [line for line in path.read_text().splitlines() if line.startswith("#")]
        commands = [line.split()[1:] for line in comment if line.startswith("#   evenpack")]
        assert all(name in words for words in commands), path
        assert not any("configs/" in line for line in comment), path


def test_explain_shows_all_keys_a_section_or_a_key() -> None:
    assert len(evenpack("config", "explain").stdout.splitlines()) > 150
    shown = evenpack("config", "explain", "data.recipe").stdout
    assert "minimum_document_length" in shown
    assert "static_masks.share" not in shown
    assert "packs" in evenpack("config", "explain", "training.packs_per_step").stdout
    value = json.loads(evenpack("config", "explain", "training.packs_per_step", "--json")[1])
    assert [(key["place"], key["unit"]) for key in value] == [("training.packs_per_step", "packs")]
    assert "Margin of equivalence" in evenpack("config", "explain", "equivalence.margin", "--file", "equivalence")[1]


def test_schema_prints_one_json_document_with_and_without_json() -> None:
    plain, as_json = json.loads(evenpack("config", "schema")[1]), json.loads(evenpack("config", "schema", "--json")[1])
    assert plain == as_json
    assert set(plain["properties"]) == set(RunConfig.model_fields)
