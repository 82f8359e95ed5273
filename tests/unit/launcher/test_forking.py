"""The run file of a fork gives the same run as its parent's."""

import pytest

from evenpack.config import load_run_file, validate
from evenpack.engine.config import RunConfig
from evenpack.launcher.forking import stated
from evenpack.launcher.new_run import write_commented
from evenpack.shipped import shipped_run_files
from evenpack.testing import run_config, run_values

RUNS = [name for name in shipped_run_files() if not name.startswith(("studies/", "finetune/"))]


@pytest.mark.parametrize("name", RUNS)
def test_a_run_file_without_defaults_gives_the_same_run(name: str, tmp_path):
    config = load_run_file(shipped_run_files()[name], RunConfig)
    path = tmp_path / "run.yaml"
    write_commented(path, stated(config), "a comment")
    assert load_run_file(path, RunConfig) == config


def test_kinds_and_keys_of_others_are_kept(tmp_path):
    values = run_values(
        "llama",
        tmp_path,
        data={"sources": {"a": {"kind": "builtin", "weight": 3}, "b": {"kind": "jsonl", "path": "b.jsonl"}}},
        training={"validation_weights": {"b": 0.5}},
        optimizer={"kind": "lamb"},
        schedule={"kind": "wsd", "decay_steps": 0},
        deepspeed={"extra": {"comms_logger": {"enabled": True}, "steps": 3}},
        metrics={"wandb": {"project": "p", "mode": "offline"}},
    )
    config = run_config(values)
    assert validate(stated(config), RunConfig, origin="it") == config
    assert "dropout" not in stated(config)["model"], "a default is left out"
    write_commented(tmp_path / "run.yaml", stated(config), "a comment")
    assert load_run_file(tmp_path / "run.yaml", RunConfig) == config
