"""Runs forked from a trunk on real ranks: each continues as the trunk would have, in a folder of its own."""

import logging
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from command_line import evenpack
from forked_ranks import fork_context, run_ranks
from killed_saves import SOLO, count_borders
from tiny_training import (
    are_equal,
    changed,
    checkpoints,
    exact,
    logged,
    never,
    numbered_lines,
    prepare_run,
    records,
    refusal,
    saved_everything,
    stop_after,
    train_all,
)

from evenpack.config import load_run_file
from evenpack.engine.checkpoints.files import find_candidates
from evenpack.engine.checkpoints.forks import checkpoint_of, take_over
from evenpack.engine.checkpoints.loading import newest_whole
from evenpack.engine.config import ParentSection, RunConfig
from evenpack.engine.reporting.run_record import read_run_record
from evenpack.engine.train import train_in
from evenpack.engine.world.distributed import World
from evenpack.errors import EvenpackError
from evenpack.files import read_json_object
from evenpack.launcher.forking import fork_run

STEPS, AT = 6, 3


@pytest.fixture(scope="module")
def trunk(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """Returns a run that two ranks have trained without a stop."""
    first = prepare_run(
        tmp_path_factory.mktemp("forks"),
        {"lines": numbered_lines()},
        steps=STEPS,
        checkpoint_every_steps=2,
        keep_checkpoints=1,
        keep_checkpoint_steps=[AT],
    )
    run = changed(
        first,
        run={"name": "trunk", "output_dir": first.run.output_dir.parent / "trunk"},
        model={"dropout": 0.1},
        schedule={"kind": "wsd", "warmup_steps": 2, "decay_steps": 0},
    )
    run_ranks(train_all, 2, [run])
    return run


def forked(trunk: RunConfig, name: str, *overrides: str, at: int = AT) -> RunConfig:
    path = trunk.run.output_dir.parent / f"{name}.yaml"
    fork_run(trunk.run.output_dir, at, path, overrides)
    return load_run_file(path, RunConfig)


def stop_and_go_on(world: World, straight: RunConfig, stopped: RunConfig) -> list[str]:
    """Trains one fork to its end, and one with a stop in between; returns what was logged."""
    logging.getLogger("evenpack").setLevel(logging.INFO)
    with logged() as said:
        train_in(world, straight, stop_requested=never)
        train_in(world, stopped, stop_requested=stop_after(1))
        train_in(world, stopped, stop_requested=never)
    return said


def test_a_fork_without_overrides_continues_bit_for_bit_as_the_trunk_and_without_it(trunk: RunConfig, tmp_path: Path):
    elsewhere = changed(trunk, run={"output_dir": tmp_path / "trunk"})
    shutil.copytree(trunk.run.output_dir, elsewhere.run.output_dir)
    straight, stopped = (
        forked(elsewhere, name, "metrics.csv=true", f"data.prepared_dir={trunk.prepared_dir}")
        for name in ("straight", "stopped")
    )
    shutil.rmtree(elsewhere.run.output_dir)
    said = "\n".join(run_ranks(stop_and_go_on, 2, straight, stopped)[0])
    assert f"continuing after step 3 of {elsewhere.run.output_dir}, up to step 6" in said
    assert "lacks" not in said, "its records begin with its first step"
    for child in (straight, stopped):
        assert exact(child) == exact(trunk)[AT:]
        assert are_equal(saved_everything(child, STEPS), saved_everything(trunk, STEPS))
        assert checkpoints(child.run.output_dir) == ["latest", "step_000006"], "that of the trunk goes as any other"
        record = read_run_record(child.run.output_dir)
        assert record is not None
        assert record.config["run"]["parent"] == {"run": str(elsewhere.run.output_dir), "step": AT}
        assert record.starts[0].steps_done == AT
    assert [start.steps_done for start in record.starts] == [3, 4]
    assert "step_000003" in checkpoints(trunk.run.output_dir), "a step that is to be kept stays"


def begin_by_hand(world: World, config: RunConfig, elsewhere: RunConfig, gone: Path) -> list[str]:
    """Trains forks whose checkpoints were not linked before; returns what is refused."""
    refused = [refusal(world, changed(config, run={"parent": {"run": gone, "step": AT}, "output_dir": gone / "out"}))]
    refused.append(refusal(world, changed(elsewhere, training={"packs_per_step": 4, "packs_per_micro_batch": 1})))
    assert not elsewhere.run.output_dir.exists(), "nothing is written of a run that is refused"
    train_in(world, elsewhere, stop_requested=never)
    refused.append(refusal(world, changed(elsewhere, run={"parent": None})))
    refused.append(refusal(world, changed(config, run={"parent": elsewhere.run.parent})))
    return refused


def test_a_run_file_alone_is_the_fork(trunk: RunConfig, tmp_path: Path):
    parent = {"run": trunk.run.output_dir, "step": AT}
    decay = changed(
        trunk,
        run={"name": "decay", "output_dir": tmp_path / "decay", "parent": parent},
        training={"steps": 5, "keep_checkpoint_steps": []},
        schedule={"decay_steps": 2},
    )
    gone, size, without, with_one = run_ranks(begin_by_hand, 1, trunk, decay, tmp_path / "gone")[0]
    assert "gone does not exist" in gone
    assert "has done 3 steps of 8" in size
    assert "run.parent is null, and of the run with the checkpoint at step 5 it is step 3 of" in without
    assert "run.parent is step 3 of" in with_one
    assert "at step 6 it is null" in with_one
    assert [record["step"] for record in records(decay)] == [4, 5]
    assert [record["learning_rate"] for record in records(decay)] == pytest.approx([3e-3 * 0.55, 3e-4])
    assert [record["order_hash"] for record in records(decay)] == [one["order_hash"] for one in records(trunk)[3:5]]
    summary = read_json_object(decay.run.output_dir / "summary.json")
    assert summary is not None
    assert summary["tokens"] == sum(record["tokens"] for record in records(trunk)[3:5]), "its own steps alone"


@pytest.mark.parametrize(
    ("at", "overrides", "reason"),
    [
        (2, (), "it has those of steps 3, 6"),
        (6, (), "would begin after step 6 and end with step 6"),
        (3, ("model.hidden_size=64",), "model.hidden_size: 32 -> 64"),
        (3, ("optimizer.kind=lamb",), "optimizer.kind: adamw -> lamb"),
        (3, ("run.seed=4",), "run.seed: 3 -> 4"),
        (3, ("training.packs_per_step=4",), "has done 3 steps of 8"),
        (3, ("training.skip_steps=[2]",), "named now, but trained on already"),
        (3, ("stages=[{step: 4, optimizer.learning_rate: 0.01}]", "optimizer.learning_rate=0.1"), "have no effect"),
        (3, ("run.output_dir={trunk}",), "is not empty"),
    ],
)
def test_what_cannot_be_forked_is_refused_before_anything_is_written(
    trunk: RunConfig, at: int, overrides: tuple[str, ...], reason: str
):
    place = trunk.run.output_dir.parent
    before = sorted(place.rglob("*"))
    with pytest.raises(EvenpackError) as caught:
        forked(trunk, "refused", *(text.replace("{trunk}", str(trunk.run.output_dir)) for text in overrides), at=at)
    assert reason in str(caught.value)
    assert sorted(place.rglob("*")) == before


def test_the_command_writes_the_file_and_refuses_one_that_exists_or_a_damaged_checkpoint(
    trunk: RunConfig, tmp_path: Path
):
    copy = tmp_path / "trunk"
    shutil.copytree(trunk.run.output_dir, copy)
    command = ("fork", copy, "--at", "3", tmp_path / "child.yaml", "schedule.decay_steps=1")
    done = evenpack(*command)
    assert done.code == 0, done.stderr
    assert f"evenpack train {tmp_path}/child.yaml" in done.stdout
    child = load_run_file(tmp_path / "child.yaml", RunConfig)
    assert child.run.parent == ParentSection(run=copy, step=3)
    assert child.training.keep_checkpoint_steps == ()
    same = changed(
        trunk,
        run={"name": "child", "output_dir": tmp_path / "child", "parent": child.run.parent},
        training={"keep_checkpoint_steps": []},
        schedule={"decay_steps": 1},
    )
    assert child == same, "nothing else differs"
    again = evenpack(*command)
    assert (again.code, "child.yaml exists already" in again.stderr) == (2, True)
    damaged = next((copy / "checkpoints" / "step_000003").glob("*.pt"))
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.unlink()
    damaged.write_bytes(content)
    broken = evenpack("fork", copy, "--at", "3", tmp_path / "other.yaml")
    assert broken.code == 2
    assert "has checksum" in broken.stderr
    assert not (tmp_path / "other.yaml").exists()


def take_over_and_die(*, parent: ParentSection, output_dir: Path, kill_at: int | None, answer: Any) -> None:
    """Takes over a checkpoint, and is killed before its `kill_at`-th change of the file system, if it has so many."""
    found = checkpoint_of(parent)
    crossed = count_borders(kill_at)
    take_over(found, output_dir)
    answer.send(len(crossed))
    os._exit(0)


def test_a_kill_before_any_write_of_a_fork_leaves_its_first_checkpoint_or_nothing(trunk: RunConfig, tmp_path: Path):
    parent = ParentSection(run=trunk.run.output_dir, step=AT)
    context, found, borders, kill_at = fork_context(), [], 0, 0
    while not borders:
        output_dir = tmp_path / f"kill_{kill_at}"
        here, there = context.Pipe(duplex=False)
        options = {"parent": parent, "output_dir": output_dir, "kill_at": kill_at, "answer": there}
        process = context.Process(target=take_over_and_die, kwargs=options)
        process.start()
        there.close()
        process.join(600)
        assert process.exitcode in (0, -signal.SIGKILL)
        borders = here.recv() if process.exitcode == 0 else 0
        directory = output_dir / "checkpoints"
        found.append(len(find_candidates(directory)))
        if not found[-1]:
            take_over(checkpoint_of(parent), output_dir)  # as the next start does
        whole = newest_whole(directory, SOLO)
        assert whole is not None
        assert whole.state == checkpoint_of(parent).state
        kill_at += 1
    assert found == sorted(found), "once it is there it stays"
    assert found.count(0) > 8
    assert found.count(1) > 2
