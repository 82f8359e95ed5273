"""Runs that begin compiled and go on uncompiled, and the reverse, are the run that is neither."""

import sys
from pathlib import Path

import pytest
from compiled_jobs import NEEDS_A_COMPILER
from forked_ranks import run_ranks
from run_files import prepared
from small_run import COMMAND, STEPS, final_weights, losses, metrics, process, train_on, write_run

from evenpack.config import load_run_file
from evenpack.engine.config import RunConfig

HALF = STEPS // 2
WITHOUT_DROPOUT = ("model.dropout=0", "optimizer.learning_rate=1e-4")


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a run file whose data are prepared."""
    path = write_run(tmp_path_factory.mktemp("compiled"))
    prepared(load_run_file(path, RunConfig))
    return path


@pytest.fixture(scope="module")
def plain(run_file: Path) -> Path:
    """Returns the output of the run without dropout that is not compiled in any step, and does not stop."""
    output_dir = run_file.parent / "plain"
    overrides = [*WITHOUT_DROPOUT, f"run.output_dir={output_dir}"]
    run_ranks(train_on, 1, load_run_file(run_file, RunConfig, overrides))
    return output_dir


@pytest.mark.slow
@NEEDS_A_COMPILER
@pytest.mark.parametrize("begins_compiled", [True, False])
def test_a_resumed_run_may_be_compiled_or_not(
    run_file: Path, plain: Path, tmp_path: Path, begins_compiled: bool
) -> None:
    mixed = tmp_path / "mixed"
    overrides = [*WITHOUT_DROPOUT, f"run.output_dir={mixed}"]
    train_half(run_file, *overrides, f"training.compile={str(begins_compiled).lower()}")
    train(run_file, *overrides, f"training.compile={str(not begins_compiled).lower()}")
    assert losses(mixed) == pytest.approx(losses(plain), rel=1e-5)
    weights, expected = final_weights(mixed), final_weights(plain)
    assert weights.keys() == expected.keys()
    assert not any("_orig_mod" in name for name in weights)


@pytest.mark.slow
@NEEDS_A_COMPILER
def test_a_compiled_run_with_dropout_resumes_bit_for_bit(run_file: Path, tmp_path: Path) -> None:
    straight, resumed = (["training.compile=true", f"run.output_dir={tmp_path / name}"] for name in ("all", "parts"))
    train(run_file, *straight)
    train_half(run_file, *resumed)
    train(run_file, *resumed)
    assert losses(tmp_path / "all") == losses(tmp_path / "parts")
    assert {step["left_eager"] for step in metrics(tmp_path / "parts")} == {0}


BROKEN_COMPILER = """#!/bin/sh
case "$*" in *--version*) echo "g++ 13.0"; exit 0 ;; esac
echo "fatal error: no room for temporary files" >&2
exit 1
"""


@pytest.mark.slow
def test_a_compilation_that_fails_in_the_first_step_ends_the_run_with_the_way_back(
    run_file: Path, tmp_path: Path
) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text(BROKEN_COMPILER)
    compiler.chmod(0o755)
    overrides = ["training.compile=true", f"run.output_dir={tmp_path / 'out'}"]
    command = [*COMMAND, "train", "--cpu-ranks", "1", str(run_file), *overrides]
    settings = {"CXX": str(compiler), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    said = process(command, expected=2, **settings).stderr
    assert "training.compile is true, and torch.compile cannot make code for this model: CppCompileError" in said
    assert "Set training.compile=false to train without it; checkpoints stay valid" in said
    assert "Traceback" not in said


def train_half(run_file: Path, *overrides: str) -> None:
    """Trains the first half of the steps, and checks that the run stopped there with a checkpoint."""
    train(run_file, *overrides, f"training.stop_after_steps={HALF}")
    (output_dir,) = (Path(one.partition("=")[2]) for one in overrides if one.startswith("run.output_dir="))
    assert len(losses(output_dir)) == HALF
    assert max(path.name for path in (output_dir / "checkpoints").glob("step_*")) == f"step_{HALF:06d}"


def train(run_file: Path, *overrides: str) -> None:
    """Trains in a process of its own, without the checks of types that torch.compile would have to trace."""
    process([sys.executable, "-m", "evenpack.launcher.worker", str(run_file), *overrides], DS_ACCELERATOR="cpu")
