"""The builder of small runs gives valid runs, which are changed key by key and prepared once."""

import subprocess
import sys
from pathlib import Path

import pytest
from run_files import changed, pair_run_values, prepared, run_config, run_values, text_sources, write_run_file

from evenpack.config import load_run_file
from evenpack.data.prepared import PreparedData
from evenpack.engine.config import RunConfig
from evenpack.errors import ConfigError


def test_both_kinds_of_runs_are_valid_and_lie_below_the_folder(tmp_path: Path) -> None:
    for config in (run_config(run_values("gpt2", tmp_path)), run_config(pair_run_values("bert", tmp_path))):
        assert config.run.output_dir == tmp_path / "out"
        assert config.prepared_dir == tmp_path / "data"


def test_sections_take_the_place_of_values_key_by_key(tmp_path: Path) -> None:
    values = run_values("gpt2", tmp_path, training={"steps": 2}, schedule={"warmup_steps": 1})
    assert values["training"] == run_values("gpt2", tmp_path)["training"] | {"steps": 2}
    assert run_config(values).schedule.warmup_steps == 1
    assert "schedule" not in run_values("gpt2", tmp_path), "a call leaves nothing for the next one"


def test_a_run_is_changed_and_checked_again(tmp_path: Path) -> None:
    config = run_config(run_values("gpt2", tmp_path))
    other = changed(config, training={"steps": 2}, deepspeed={"zero_stage": 1})
    assert (other.training.steps, other.deepspeed.zero_stage) == (2, 1)
    assert changed(other, training={"steps": 6}, deepspeed={"zero_stage": 0}) == config
    with pytest.raises(ConfigError, match=r"training\.steps"):
        changed(config, training={"steps": 0})


def test_documents_of_a_test_are_prepared_source_by_source(tmp_path: Path) -> None:
    sources = text_sources(tmp_path, {"one": ["a b", "c d e"], "two": ["f g h i"] * 3})
    config = prepared(run_config(run_values("gpt2", tmp_path, data={"sources": sources})))
    found = PreparedData.open(config.prepared_dir, config.data)
    assert [found.view(name, "train").accounting.documents_read for name in ("one", "two")] == [2, 3]
    before = (config.prepared_dir / "manifest.json").stat()
    assert prepared(config) == config
    assert (config.prepared_dir / "manifest.json").stat() == before


def test_a_run_file_says_what_its_values_say(tmp_path: Path) -> None:
    values = pair_run_values("bert", tmp_path)
    path = write_run_file(tmp_path / "run.yaml", values)
    assert load_run_file(path, RunConfig) == run_config(values)


def test_importing_it_brings_neither_torch_nor_a_test_runner() -> None:
    code = "import sys, evenpack.testing; print([name for name in ('torch', 'pytest') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
