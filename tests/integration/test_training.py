"""Whole runs: order, resume, layouts and world sizes (invariants 3 to 7). `test_commands` starts one by the command."""

import json
import shutil
from functools import cache
from pathlib import Path

import pytest
from forked_ranks import run_ranks
from run_files import changed, prepared, run_config, write_run_file
from slow_cases import slow_but
from small_run import EXACT, STEPS, assert_same_run, losses, metrics, small_run_values, steps, train_on

from evenpack.config import load_run_file
from evenpack.engine.config import RunConfig
from evenpack.engine.world.distributed import World
from evenpack.errors import CheckpointError

UNDROPPED = {"dropout": 0.0}
"""Dropout's masks depend on the split."""

ON_ONE_RANK = {"packs_per_micro_batch": 4}
"""As many micro-batches as on two."""


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepares a run."""
    folder = tmp_path_factory.mktemp("training")
    values = small_run_values(folder)
    prepared(run_config(values))
    return write_run_file(folder / "run.yaml", values)


@pytest.fixture(scope="module")
def straight(run_file: Path) -> Path:
    """Returns the output of an uninterrupted run on two ranks."""
    return train(run_file, "straight")


@cache
def undropped(run_file: Path) -> Path:
    """Returns the output of the same run without dropout."""
    return train(run_file, "undropped", model=UNDROPPED)


@cache
def alone(run_file: Path) -> Path:
    """Returns the output of the same run on one rank."""
    return train(run_file, "alone", ranks=1, model=UNDROPPED, training=ON_ONE_RANK)


def train(run_file: Path, name: str, *, ranks: int = 2, **sections: dict[str, object]) -> Path:
    """Trains with some values changed; returns the output."""
    config = changed(load_run_file(run_file, RunConfig), **{"run": {"output_dir": run_file.parent / name}, **sections})
    run_ranks(train_on, ranks, config)
    return config.run.output_dir


def test_a_run_leaves_metrics_a_summary_and_checkpoints(straight: Path) -> None:
    records = steps(straight, *EXACT)
    assert [record[0] for record in records] == list(range(1, STEPS + 1))
    assert losses(straight)[-1] < losses(straight)[0]
    summary = json.loads((straight / "summary.json").read_text())
    assert summary["step"] == STEPS
    assert (straight / "checkpoints" / "latest").read_text().strip() == f"step_{STEPS:06d}"
    evaluated = [record["step"] for record in metrics(straight) if "validation" in record]
    assert evaluated == [4, 8, 12]


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [0, 1])
def test_a_stopped_run_resumes_bit_for_bit(run_file: Path, straight: Path, zero_stage: int) -> None:
    deepspeed = {"zero_stage": zero_stage}
    whole = straight if zero_stage == 0 else train(run_file, "zero_1", deepspeed=deepspeed)
    name = f"resumed_{zero_stage}"
    train(run_file, name, deepspeed=deepspeed, training={"stop_after_steps": 6 - zero_stage})
    assert len(steps(run_file.parent / name, "step")) == 6 - zero_stage
    assert_same_run(train(run_file, name, deepspeed=deepspeed), whole)
    assert steps(whole, "order_hash") == steps(straight, "order_hash")
    assert losses(whole) == pytest.approx(losses(straight), rel=1e-5)


@pytest.mark.parametrize("ranks", slow_but([1], [1, 4]))
def test_other_ranks_give_the_same_order_and_loss(run_file: Path, straight: Path, ranks: int) -> None:
    on_four = {"packs_per_micro_batch": 1}
    output = alone(run_file) if ranks == 1 else train(run_file, "four", ranks=4, model=UNDROPPED, training=on_four)
    assert steps(output, "step", "tokens", "targets", "order_hash") == steps(
        straight, "step", "tokens", "targets", "order_hash"
    )
    assert losses(output) == pytest.approx(losses(undropped(run_file)), rel=1e-5)


def test_a_run_resumes_with_another_number_of_ranks(run_file: Path, straight: Path) -> None:
    output = train(run_file, "fewer", model=UNDROPPED, training={"stop_after_steps": 6})
    assert len(steps(output, "step")) == 6
    train(run_file, "fewer", ranks=1, model=UNDROPPED)
    assert steps(output, "order_hash") == steps(straight, "order_hash")
    assert losses(output) == pytest.approx(losses(undropped(run_file)), rel=1e-5)


@pytest.mark.parametrize("layout", slow_but(["unpadded"], ["unpadded", "padded"]))
def test_every_layout_gives_the_same_loss(run_file: Path, layout: str) -> None:
    output = train(run_file, layout, model=UNDROPPED, training={"layout": layout})
    assert steps(output, "order_hash", "targets") == steps(undropped(run_file), "order_hash", "targets")
    assert losses(output) == pytest.approx(losses(undropped(run_file)), rel=1e-5)


@pytest.mark.slow
def test_prefetching_workers_do_not_change_the_run(run_file: Path) -> None:
    """Two workers on one rank alternate; test_static_mask_commands has one on each of two ranks."""
    workers = train(run_file, "workers", ranks=1, model=UNDROPPED, training={**ON_ONE_RANK, "loader_workers": 2})
    assert_same_run(workers, alone(run_file))


def refused(world: World, config: RunConfig) -> str:
    with pytest.raises(CheckpointError) as caught:
        train_on(world, config)
    return str(caught.value)


def test_other_data_is_refused_with_an_explanation(run_file: Path, straight: Path) -> None:
    output = run_file.parent / "other_data"
    shutil.copytree(straight, output)
    other = changed(load_run_file(run_file, RunConfig), run={"output_dir": output, "seed": 6})
    for message in run_ranks(refused, 2, other):
        assert "fingerprint" in message
    assert len(steps(output, "step")) == STEPS, "nothing is cut back"


def test_a_truncated_checkpoint_is_passed_over_for_the_one_before(run_file: Path, straight: Path) -> None:
    output = run_file.parent / "truncated"
    shutil.copytree(straight, output)
    newest = max((output / "checkpoints" / f"step_{STEPS:06d}").glob("*.pt"), key=lambda path: path.stat().st_size)
    with newest.open("r+b") as file:
        file.truncate(newest.stat().st_size // 2)
    assert_same_run(train(run_file, "truncated"), straight)
