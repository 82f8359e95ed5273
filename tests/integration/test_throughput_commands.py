"""`study throughput` as a user types it."""

import json
import sys
from pathlib import Path

import pytest
from small_run import evenpack, process, write_run

from evenpack.studies.cost_model_fit import CostModel


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepares a run."""
    path = write_run(tmp_path_factory.mktemp("throughput"))
    evenpack("prepare", path)
    return path


@pytest.mark.slow
def test_a_throughput_study_prints_draws_and_writes_a_cost_model(run_file: Path, tmp_path: Path) -> None:
    plot, model = tmp_path / "figure.png", tmp_path / "model.json"
    options = ["--rounds", "2", "--warmup", "1", "--depths", "1,none", "--samples", "24", "--clock", "cpu"]
    done = evenpack("study throughput", run_file, options=[*options, "--plot", str(plot), "--cost-model", str(model)])
    for words in ("packing factor", "held-out"):
        assert words in done.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")
    found = CostModel.read(model)
    assert found.measured_on.layers == 2
    assert found.samples == 24 + 3 * 3 * 4 - 3 * 4  # four micro-batches per step, two rounds of three layouts


def test_what_was_measured_is_shown_although_no_cost_model_comes_of_it(run_file: Path, tmp_path: Path) -> None:
    model = tmp_path / "model.json"
    options = ["--rounds", "1", "--warmup", "0", "--depths", "", "--samples", "1", "--layouts", "packed", "--json"]
    done = evenpack("study throughput", run_file, options=[*options, "--cost-model", str(model)], expected=2)
    assert json.loads(done.stdout)["layouts"][0]["layout"] == "packed"
    assert f"{model} was not written: a cost model needs 12 different micro-batches" in done.stderr
    assert not model.exists()


@pytest.mark.slow
def test_two_ranks_measure_together_and_print_once(run_file: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    command += ["evenpack.launcher.cli", "study", "throughput", str(run_file), "--rounds", "1", "--warmup", "0"]
    command += ["--depths", "", "--samples", "0", "--layouts", "unpadded,unpadded/max_tokens", "--json"]
    value = json.loads(process(command, DS_ACCELERATOR="cpu").stdout)
    assert value["ranks"] == 2
    assert [row["layout"] for row in value["layouts"]] == ["unpadded", "unpadded/max_tokens"]
    assert all(0.0 < row["wait_share"] < 1.0 for row in value["layouts"])
    assert value["cost_model"] is None
