"""`evenpack prepare` by several processes: `--workers`, and ranks that `mpirun` starts."""

import sys
from pathlib import Path

import pytest
from prepared_files import contents
from small_run import COMMAND, Done, evenpack, process, write_run

PART_BYTES = "8000"
_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def alone(run_file: Path) -> dict[str, bytes]:
    """What this process prepares without workers."""
    evenpack("prepare", run_file, "--workers", "1", "--part-bytes", PART_BYTES)
    return contents(run_file.parent / "data")


def mpirun(ranks: int, run_file: Path, *arguments: str, expected: int = 0) -> Done:
    launcher = (str(Path(sys.executable).with_name("mpirun")), "--oversubscribe", "-n", str(ranks))
    return process([*launcher, *COMMAND, "prepare", str(run_file), *arguments], expected=expected, **_AS_ROOT)


def test_workers_write_what_one_process_writes(run_file: Path, alone: dict[str, bytes], tmp_path: Path) -> None:
    prepared = f"data.prepared_dir={tmp_path / 'data'}"
    evenpack("prepare", run_file, prepared, "--workers", "2", "--part-bytes", PART_BYTES)
    assert contents(tmp_path / "data") == alone


def test_ranks_of_mpi_write_what_one_process_writes(run_file: Path, alone: dict[str, bytes], tmp_path: Path) -> None:
    prepared = f"data.prepared_dir={tmp_path / 'data'}"
    done = mpirun(3, run_file, prepared, "--part-bytes", PART_BYTES)
    assert contents(tmp_path / "data") == alone
    told = " ".join(done.stderr.split())
    assert told.count("CPU seconds of its workers") == 2, "rank 0 alone reports"
    assert told.count(", process ") >= 3, "more than one rank has tokenised"


def test_a_mistake_under_mpirun_is_told_once_and_ends_every_rank(run_file: Path, tmp_path: Path) -> None:
    prepared = f"data.prepared_dir={tmp_path / 'data'}"
    done = mpirun(2, run_file, prepared, "data.sources.one.text_key=body", expected=2)
    assert done.stderr.count("the keys there are: 'text'") == 1
    assert not (tmp_path / "data").exists()


def test_workers_are_not_asked_for_under_mpirun(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    done = evenpack("prepare", run_file, "--workers", "2", expected=2)
    assert "under mpirun the ranks are the workers: leave out --workers" in done.stderr


def test_mpi_without_mpi4py_names_the_package(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    done = evenpack("prepare", run_file, expected=2)
    told = " ".join(done.stderr.split())
    assert "started as one of 4 MPI ranks, but mpi4py cannot be imported" in told
    assert "install evenpack[mpi]" in told
