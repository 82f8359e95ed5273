"""The run file of a fork gives the same run as its parent's."""

import json
from pathlib import Path

import pytest
from run_files import run_config, run_values

from evenpack.config import load_run_file, validate
from evenpack.data.order.step_shape import CostWeights
from evenpack.engine.checkpoints.files import Checkpoint, TrainState
from evenpack.engine.config import ParentSection, RunConfig
from evenpack.launcher.forking import _values, stated
from evenpack.launcher.new_run import write_commented
from evenpack.shipped import shipped_run_files

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


def checkpoint_of(config: RunConfig, path: Path, *, step: int) -> Checkpoint:
    state = TrainState(
        step=step,
        fingerprint="f",
        world_size=1,
        zero_stage=0,
        cost_weights=CostWeights(per_token=1.0, per_squared_length=0.0, per_segment=0.0),
        config=config.model_dump(mode="json"),
        reached_accuracy=None,
        samples=0,
    )
    return Checkpoint(path=path, state=state, files=())


@pytest.mark.parametrize(("has_moved", "place"), [(False, "trunk"), (True, "moved")])
def test_the_data_is_beside_the_checkpoint_or_where_the_run_file_has_it(tmp_path: Path, has_moved: bool, place: str):
    """The first checkpoint of a fork has the trunk's run file, and the fork's own folder has no data."""
    trunk = run_config(
        run_values("llama", tmp_path, run={"output_dir": tmp_path / "trunk"}, data={"prepared_dir": None})
    )
    (tmp_path / place / "data").mkdir(parents=True)
    parent = ParentSection(run=tmp_path / ("moved" if has_moved else "fork"), step=3)
    checkpoint = checkpoint_of(trunk, parent.run / "checkpoints" / "step_000003", step=3)
    values = _values(checkpoint, parent, "child")
    assert values["data"]["prepared_dir"] == str(tmp_path / place / "data")
    assert values["run"]["output_dir"] == str(tmp_path / "child")
    here = ParentSection(run=Path(), step=3)
    assert _values(checkpoint, here, "child")["run"]["output_dir"] == "../child", "and not in the trunk's own folder"


def test_a_fork_of_a_fork_at_its_first_step_has_the_run_file_of_the_fork(tmp_path: Path):
    trunk = {"run": tmp_path / "trunk", "step": 3}
    fork = run_config(
        run_values(
            "llama", tmp_path, run={"output_dir": tmp_path / "fork", "parent": trunk}, optimizer={"weight_decay": 0.25}
        )
    )
    record = {
        "config": fork.model_dump(mode="json"),
        "data": {"fingerprint": "f", "tokenizer": "t", "vocabulary_size": 9, "pack_length": 32, "sources": ["one"]},
        "starts": [
            {"steps_done": 3, "ranks": 1, "device": "cpu", "commit": None, "evenpack": "1", "torch": "2", "date": "d"}
        ],
    }
    (tmp_path / "fork").mkdir()
    (tmp_path / "fork" / "run.json").write_text(json.dumps(record), encoding="utf-8")
    for step, decay in ((3, 0.25), (4, None)):
        checkpoint = checkpoint_of(run_config(run_values("llama", tmp_path)), tmp_path, step=step)
        values = _values(checkpoint, ParentSection(run=tmp_path / "fork", step=step), "child")
        assert values["optimizer"].get("weight_decay") == decay
        assert values["run"]["parent"] == {"run": str(tmp_path / "fork"), "step": step}
