"""`evenpack slurm` checks the run before it writes; `evenpack stop` asks the run that goes on."""

from pathlib import Path

import pytest
from command_line import evenpack

from evenpack.launcher.processes.identities import RankPlace
from evenpack.launcher.processes.ranks import RankFolder, RankStatus
from evenpack.launcher.processes.stop import read_stop_request
from evenpack.testing import prepared, run_config, run_values, text_sources, write_run_file


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    values = run_values("gpt2", folder, data={"sources": text_sources(folder, {"lines": ["some text"] * 60})})
    prepared(run_config(values))
    return write_run_file(folder / "run.yaml", values)


def refusal(*arguments: object) -> str:
    """Returns the message of a command that ends with 2."""
    code, _, message = evenpack(*arguments)
    assert code == 2
    return " ".join(message.split())


def test_a_script_is_written_for_ranks_that_divide_the_step(run_file: Path, tmp_path: Path) -> None:
    script = tmp_path / "night.sbatch"
    command = ("slurm", run_file, "--nodes", "2", "--gpus-per-node", "2", "--output", script)
    done = evenpack(*command)
    assert done.code == 0
    assert f"sbatch {script}" in done.stdout
    assert f"run=({run_file})" in script.read_text()
    assert (run_file.parent / "out").is_dir(), "Slurm opens its log there before the script starts"
    assert "exists already" in refusal(*command)


def test_the_script_of_a_shipped_run_has_its_whole_name(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    named = run_file.with_name("llama_1.1b")  # as shipped ones are named, without .yaml
    named.write_bytes(run_file.read_bytes())
    assert evenpack("slurm", named, "--nodes", "2", "--gpus-per-node", "2").code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["llama_1.1b.sbatch"]


def test_nodes_that_cannot_divide_the_step_are_refused_with_the_numbers_that_can(
    run_file: Path, tmp_path: Path
) -> None:
    script = tmp_path / "night.sbatch"
    assert "the number of ranks can be 1, 2, 4" in refusal("slurm", run_file, "--nodes", 3, "--output", script)
    assert not script.exists()


def test_a_folder_that_is_missing_or_cannot_be_made_is_named(run_file: Path, tmp_path: Path) -> None:
    command = ("slurm", run_file, "--nodes", "2", "--gpus-per-node", "2", "--output")
    missing = refusal(*command, tmp_path / "missing" / "night.sbatch")
    assert "night.sbatch cannot be written: No such file or directory" in missing
    nowhere = refusal(*command, tmp_path / "night.sbatch", "run.output_dir=/dev/null/out")
    assert "/dev/null/out cannot be made: Not a directory" in nowhere
    assert "name another run.output_dir" in nowhere
    assert not any(tmp_path.iterdir())


def test_a_run_that_goes_on_is_asked_to_stop(run_file: Path) -> None:
    output_dir = run_file.parent / "out"
    folder = RankFolder(output_dir, "now")
    folder.path.mkdir(parents=True)
    status = RankStatus.starting("now", RankPlace.of_environment({}))
    folder.write_status(status)
    assert evenpack("stop", run_file).code == 0
    request = read_stop_request(output_dir, "now")
    assert request is not None
    assert not request.at_once
    folder.write_status(status.ended("finished", exit_code=0, step=6))
    assert "no run is going on" in refusal("stop", run_file)
