"""Whole runs under `deepspeed`: order, resume, layouts and world sizes; invariants 3 to 7 from end to end."""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from small_run import EVENPACK, STEPS, evenpack, metrics, steps, worker, write_run

from evenpack.engine.checkpoints.files import read_manifest
from evenpack.engine.checkpoints.weights import load_model_weights

EXACT = ("step", "loss", "learning_rate", "gradient_norm", "tokens", "targets", "order_hash")


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared run."""
    path = write_run(tmp_path_factory.mktemp("training"))
    evenpack("prepare", path)
    return path


@pytest.fixture(scope="module")
def straight(run_file: Path) -> Path:
    """The output of an uninterrupted run on two ranks."""
    return train(run_file, "straight")


def train(run_file: Path, name: str, *overrides: str, ranks: int = 2, expected: int = 0) -> Path:
    output = run_file.parent / name
    evenpack(
        "train",
        run_file,
        f"run.output_dir={output}",
        *overrides,
        options=["--cpu-ranks", str(ranks)],
        expected=expected,
    )
    return output


def final_weights(output: Path) -> dict[str, torch.Tensor]:
    return load_model_weights(read_manifest(output / "checkpoints" / f"step_{STEPS:06d}"))


def assert_same_run(output: Path, straight: Path) -> None:
    assert steps(output, *EXACT) == steps(straight, *EXACT)
    expected = final_weights(straight)
    for name, tensor in final_weights(output).items():
        assert torch.equal(tensor, expected[name]), name


def losses(output: Path) -> list[float]:
    return [loss for (loss,) in steps(output, "loss")]


def test_a_run_leaves_metrics_a_summary_and_checkpoints(straight: Path) -> None:
    records = steps(straight, *EXACT)
    assert [record[0] for record in records] == list(range(1, STEPS + 1))
    assert losses(straight)[-1] < losses(straight)[0]
    summary = json.loads((straight / "summary.json").read_text())
    assert summary["step"] == STEPS
    assert (straight / "checkpoints" / "latest").read_text().strip() == f"step_{STEPS:06d}"
    evaluated = [record["step"] for record in metrics(straight) if "validation" in record]
    assert evaluated == [4, 8, 12]


def test_a_stopped_run_goes_on_bit_for_bit(run_file: Path, straight: Path) -> None:
    train(run_file, "resumed", "training.stop_after_steps=6")
    assert len(steps(run_file.parent / "resumed", "step")) == 6
    assert_same_run(train(run_file, "resumed"), straight)


def test_zero_1_gives_the_same_losses_and_goes_on_bit_for_bit(run_file: Path, straight: Path) -> None:
    whole = train(run_file, "zero_1", "deepspeed.zero_stage=1")
    assert steps(whole, "order_hash") == steps(straight, "order_hash")
    assert losses(whole) == pytest.approx(losses(straight), rel=1e-5)
    train(run_file, "zero_1_resumed", "deepspeed.zero_stage=1", "training.stop_after_steps=5")
    assert_same_run(train(run_file, "zero_1_resumed", "deepspeed.zero_stage=1"), whole)


def test_a_killed_rank_ends_the_run_by_name_and_the_next_start_goes_on_bit_for_bit(
    run_file: Path, straight: Path
) -> None:
    output = run_file.parent / "killed"
    command = [EVENPACK, "train", "--cpu-ranks", "2", run_file, f"run.output_dir={output}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_for_step(output, 5)
    started = time.monotonic()
    os.kill(rank_process(output, 1), signal.SIGKILL)
    text, _ = process.communicate(timeout=60)
    assert process.returncode not in (0, 75)
    assert time.monotonic() - started < 60
    assert "rank 1" in text
    with (output / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # a torn line, as a kill in the middle of writing leaves it
    assert_same_run(train(run_file, "killed"), straight)


@pytest.mark.parametrize(("ranks", "micro_batch"), [(1, 4), (4, 1)])
def test_other_ranks_and_accumulation_give_the_same_order_and_loss(
    run_file: Path, straight: Path, ranks: int, micro_batch: int
) -> None:
    changed = ["model.dropout=0.0", f"training.packs_per_micro_batch={micro_batch}"]
    reference = undropped(run_file)
    output = train(run_file, f"ranks_{ranks}", *changed, ranks=ranks)
    assert steps(output, "step", "tokens", "targets", "order_hash") == steps(
        straight, "step", "tokens", "targets", "order_hash"
    )
    assert losses(output) == pytest.approx(losses(reference), rel=1e-5)


def test_a_run_goes_on_with_another_number_of_ranks(run_file: Path, straight: Path) -> None:
    reference = undropped(run_file)
    train(run_file, "fewer", "model.dropout=0.0", "training.stop_after_steps=6")
    output = run_file.parent / "fewer"
    worker(run_file, f"run.output_dir={output}", "model.dropout=0.0")
    assert steps(output, "order_hash") == steps(straight, "order_hash")
    assert losses(output) == pytest.approx(losses(reference), rel=1e-5)


@pytest.mark.parametrize("layout", ["unpadded", "padded"])
def test_every_layout_gives_the_same_loss(run_file: Path, layout: str) -> None:
    reference = undropped(run_file)
    output = train(run_file, layout, "model.dropout=0.0", f"training.layout={layout}")
    assert steps(output, "order_hash", "targets") == steps(reference, "order_hash", "targets")
    assert losses(output) == pytest.approx(losses(reference), rel=1e-5)


def test_prefetching_workers_do_not_change_the_run(run_file: Path, straight: Path) -> None:
    assert_same_run(train(run_file, "workers", "training.loader_workers=2"), straight)


def test_other_data_is_refused_with_an_explanation(run_file: Path, straight: Path) -> None:
    output = run_file.parent / "other_data"
    shutil.copytree(straight, output)
    done = evenpack(
        "train", run_file, f"run.output_dir={output}", "run.seed=6", options=["--cpu-ranks", "1"], expected=2
    )
    assert "fingerprint" in done.stderr
    assert len(steps(output, "step")) == STEPS, "nothing is cut back"


def test_a_truncated_checkpoint_is_passed_over_for_the_one_before(run_file: Path, straight: Path) -> None:
    output = run_file.parent / "truncated"
    shutil.copytree(straight, output)
    newest = max((output / "checkpoints" / f"step_{STEPS:06d}").glob("*.pt"), key=lambda path: path.stat().st_size)
    with newest.open("r+b") as file:
        file.truncate(newest.stat().st_size // 2)
    assert_same_run(train(run_file, "truncated"), straight)


def undropped(run_file: Path) -> Path:
    """Two ranks without dropout, whose masks depend on the split."""
    output = run_file.parent / "undropped"
    return output if (output / "summary.json").exists() else train(run_file, "undropped", "model.dropout=0.0")


def wait_for_step(output: Path, step: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        path = output / "metrics.jsonl"
        if path.exists() and path.read_text().count("learning_rate") >= step:
            return
        time.sleep(0.02)
    raise AssertionError(f"no step {step} within two minutes")


def rank_process(output: Path, rank: int) -> int:
    """Pid of a rank, as its status file tells."""
    (status,) = (output / "ranks").rglob(f"rank_{rank}.json")
    return int(json.loads(status.read_text())["process"]["pid"])
