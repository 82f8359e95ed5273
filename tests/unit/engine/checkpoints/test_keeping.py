"""Which checkpoints are kept: the newest, one every so many hours, the best; never fewer than one."""

import errno
import math
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_checkpoint_files import FileEngine, names, train_state

from evenpack.engine.checkpoints.files import Checkpoint
from evenpack.engine.checkpoints.keeping import KeepPolicy, best_step
from evenpack.engine.checkpoints.saving import CheckpointWriter
from evenpack.engine.config import RunConfig
from evenpack.engine.evaluate import SourceEvaluation, overall_loss
from evenpack.engine.world.distributed import World
from evenpack.errors import CheckpointError, ConfigError
from evenpack.testing import run_config, run_values

SOLO = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))


def checkpoint(step: int, *, hours: float = 0.0, loss: float | None = None) -> Checkpoint:
    state = replace(train_state(step), validation_loss=loss)
    return Checkpoint(path=Path(f"step_{step:06d}"), state=state, files=(), saved_at=1e9 + 3600 * hours)


def kept(
    checkpoints: list[Checkpoint], *, newest: int = 1, hours: float | None = None, best: bool = False
) -> list[int]:
    policy = KeepPolicy(newest=newest, every_hours=hours, best=best)
    return [one.step for one in policy.kept(checkpoints)]


def test_the_newest_are_kept_whatever_else_is():
    assert kept([checkpoint(step) for step in (3, 1, 2)], newest=2) == [2, 3]
    assert kept([checkpoint(1)], newest=2) == [1]


def test_those_of_named_steps_are_kept_for_ever():
    policy = KeepPolicy(newest=1, steps=frozenset({2, 4, 9}))
    assert [one.step for one in policy.kept([checkpoint(step) for step in range(1, 7)])] == [2, 4, 6]


def test_one_is_kept_for_every_so_many_hours_beginning_with_the_first():
    saved = [checkpoint(step, hours=step / 10) for step in range(1, 36)]
    assert kept(saved, hours=1.0) == [1, 11, 21, 31, 35]


def test_a_clock_that_was_wrong_once_may_keep_one_too_many_and_never_too_few():
    times = {1: 0.0, 2: 1.0, 3: 49_000.0, 4: 2.0, 5: 2.5, 6: 3.0, 7: 4.0}
    seen: list[Checkpoint] = []
    policy = KeepPolicy(newest=1, every_hours=1.0, best=False)
    for step, hours in times.items():
        seen = policy.kept([*seen, checkpoint(step, hours=hours)])
    assert [one.step for one in seen] == [1, 2, 3, 4, 6, 7]


def test_checkpoints_without_loss_are_no_best_ones():
    saved = [checkpoint(1), checkpoint(2), checkpoint(3, hours=0.1, loss=2.0), checkpoint(4, hours=0.2, loss=3.0)]
    assert kept(saved, best=True) == [3, 4]
    assert kept(saved[:2], best=True) == [2]


def test_the_best_is_that_of_the_lowest_loss_and_of_equal_ones_the_newest():
    losses = {1: math.nan, 2: 1.0, 3: None, 4: 1.0, 5: 2.0, 6: 3.0}
    saved = [checkpoint(step, loss=loss) for step, loss in losses.items()]
    assert kept(saved, best=True) == [4, 6]
    assert kept([*saved, checkpoint(7, loss=0.5)], best=True) == [7]


def of_sources(one: Checkpoint, *names: str, weights: dict[str, float] | None = None) -> Checkpoint:
    config = {"data": {"sources": dict.fromkeys(names)}, "training": {"validation_weights": weights}}
    return replace(one, state=replace(one.state, config=config))


def test_losses_of_other_sources_or_weights_are_no_comparison():
    """A source that joins would else leave the checkpoints before it the best ones, or the first of all."""
    saved = [of_sources(checkpoint(step, loss=float(step)), "a") for step in (1, 2)]
    joined = [of_sources(checkpoint(step, loss=9.0 - step / 10), "b", "a") for step in (3, 4, 5)]
    assert kept([*saved, checkpoint(6)], best=True) == [1, 6]
    assert kept([*saved, *joined[::-1], checkpoint(6)], best=True) == [5, 6]
    assert kept([*saved, of_sources(joined[0], "b", "a", weights={"a": 1.0})], best=True) == [3]


def test_rules_add_up():
    saved = [checkpoint(step, hours=step, loss=float(abs(step - 4))) for step in range(1, 10)]
    assert kept(saved, newest=2, hours=3.0, best=True) == [1, 4, 7, 8, 9]


@given(
    gaps=st.lists(st.floats(0.01, 3.0), min_size=1, max_size=12),
    losses=st.lists(st.integers(0, 3), min_size=12, max_size=12),
)
@settings(max_examples=60, deadline=None)
def test_removing_after_each_save_keeps_what_one_who_saw_all_would_keep(gaps: list[float], losses: list[int]):
    everything: list[Checkpoint] = []
    present: list[Checkpoint] = []
    policy = KeepPolicy(newest=2, every_hours=1.0, best=True)
    for step, hours in enumerate(accumulate(gaps), start=1):
        saved = checkpoint(step, hours=hours, loss=float(losses[step - 1]))
        everything.append(saved)
        present = policy.kept([*present, saved])
        assert saved in present
        assert present == policy.kept(everything)


def test_a_policy_that_keeps_nothing_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        KeepPolicy(newest=0, every_hours=1.0, best=True)


class TestOnDisk:
    def save(self, directory: Path, losses: dict[int, float | None]) -> CheckpointWriter:
        writer = CheckpointWriter(directory, SOLO, KeepPolicy(newest=1, best=True))
        for step, loss in losses.items():
            writer.save(FileEngine(), replace(train_state(step), validation_loss=loss))
        return writer

    def test_the_best_stays_while_newer_ones_come_and_go(self, tmp_path: Path):
        self.save(tmp_path, {1: 3.0, 2: 1.5, 3: 2.0, 4: None})
        assert names(tmp_path) == ["latest", "step_000002", "step_000004"]
        assert best_step(tmp_path) == 2

    def test_a_broken_checkpoint_is_not_the_best(self, tmp_path: Path):
        writer = self.save(tmp_path, {1: 3.0, 2: 1.5})
        (tmp_path / "step_000002" / "mp_rank_00_model_states.pt").write_bytes(b"")
        writer.save(FileEngine(), replace(train_state(3), validation_loss=2.0))
        assert names(tmp_path) == ["latest", "step_000003"]

    def test_one_that_a_kill_left_under_a_hidden_name_is_not_kept_once_another_is_whole(self, tmp_path: Path):
        self.save(tmp_path, {1: 1.0})
        (tmp_path / "step_000001").rename(tmp_path / ".step_000001.replaced")
        assert best_step(tmp_path) == 1
        self.save(tmp_path, {2: 2.0})
        assert names(tmp_path) == ["latest", "step_000002"]

    def test_without_a_validation_loss_none_is_the_best(self, tmp_path: Path):
        self.save(tmp_path, {1: None})
        with pytest.raises(CheckpointError, match="no checkpoint with a validation loss"):
            best_step(tmp_path)

    @pytest.mark.parametrize("unreadable", ["manifest.json", "mp_rank_00_model_states.pt"])
    def test_a_disk_that_does_not_answer_at_a_save_costs_no_checkpoint(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unreadable: str
    ):
        self.save(tmp_path, {1: None, 2: None})
        stat, read = Path.stat, Path.read_bytes

        def refuse(path: Path) -> None:
            if path.name == unreadable and path.parent.name.startswith("step_"):
                raise OSError(errno.EIO, "Input/output error")

        def refused_stat(path: Path, **options: Any) -> Any:
            refuse(path)
            return stat(path, **options)

        def refused_read(path: Path) -> bytes:
            refuse(path)
            return read(path)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "stat", refused_stat)
            patch.setattr(Path, "read_bytes", refused_read)
            self.save(tmp_path, {3: None})
        assert names(tmp_path) == ["latest", "step_000002", "step_000003"]


def evaluation(loss: float, targets: int) -> SourceEvaluation:
    return SourceEvaluation(loss=loss, accuracy=0.0, others={}, targets=targets, sequences=1, packs=1)


def test_losses_of_sources_are_added_by_targets_or_by_the_weights_of_the_run_file():
    both = {"few": evaluation(4.0, 10), "many": evaluation(2.0, 30)}
    assert overall_loss(both, None) == 2.5
    assert overall_loss(both, {"few": 1.0}) == 4.0
    assert overall_loss({}, {"few": 1.0}) is None
    assert overall_loss({"few": evaluation(math.nan, 10)}, None) is None


def config_of(training: dict[str, Any], validation_fraction: float = 0.1) -> RunConfig:
    evaluated = {"steps": 10, "keep_best_checkpoint": True, "checkpoint_every_steps": 5, "evaluate_every_steps": 5}
    data = {"validation_fraction": validation_fraction}
    return run_config(run_values("gpt2", Path("nowhere"), data=data, training=evaluated | training))


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"keep_checkpoints": 0}, r"training.keep_checkpoints.*greater than or equal to 1"),
        ({"keep_checkpoint_every_hours": 0}, r"training.keep_checkpoint_every_hours.*greater than 0"),
        ({"evaluate_every_steps": None}, "the model is never evaluated"),
        ({"evaluate_every_steps": 4, "checkpoint_every_steps": 3}, r"that of step 12, above training.steps \(10\)"),
    ],
)
def test_a_policy_that_keeps_nothing_or_can_never_apply_is_refused(training: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        config_of(training)


def test_the_best_of_a_run_that_holds_nothing_out_is_refused():
    with pytest.raises(ConfigError, match="nothing is held out"):
        config_of({}, validation_fraction=0.0)


@pytest.mark.parametrize("training", [{}, {"evaluate_every_steps": 4, "checkpoint_every_steps": 10}])
def test_a_policy_that_applies_once_is_not_refused(training: dict[str, Any]):
    assert config_of(training).training.keep_best_checkpoint
