"""`evenpack prepare` with several processes: `--workers`, and ranks that `mpirun` starts."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from prepared_files import command_with_parts, contents
from small_run import HANGS_SECONDS, Done, evenpack, process, write_corpus, write_run

from evenpack.data.prepare import source

PART_BYTES = 8000
_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module", autouse=True)
def small_parts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source, "SMALLEST_PART_BYTES", PART_BYTES)
        yield


@pytest.fixture(scope="module")
def alone(run_file: Path, small_parts: None) -> dict[str, bytes]:
    """Prepares in this process without workers."""
    evenpack("prepare", run_file, "--workers", "1")
    return contents(run_file.parent / "data")


def mpirun_command(ranks: int) -> list[str]:
    return [str(Path(sys.executable).with_name("mpirun")), "--oversubscribe", "-n", str(ranks)]


def mpirun(ranks: int, run_file: Path, *arguments: str, expected: int = 0) -> Done:
    command = [*mpirun_command(ranks), *command_with_parts(PART_BYTES), "prepare", str(run_file), *arguments]
    return process(command, expected=expected, **_AS_ROOT)


def test_workers_write_what_one_process_writes(run_file: Path, alone: dict[str, bytes], tmp_path: Path) -> None:
    prepared = f"data.prepared_dir={tmp_path / 'data'}"
    evenpack("prepare", run_file, prepared, "--workers", "2")
    assert contents(tmp_path / "data") == alone


@pytest.mark.slow
def test_ranks_of_mpi_write_what_one_process_writes(run_file: Path, alone: dict[str, bytes], tmp_path: Path) -> None:
    prepared = f"data.prepared_dir={tmp_path / 'data'}"
    mpirun(3, run_file, prepared)
    assert contents(tmp_path / "data") == alone


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_job_and_the_same_command_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_file = write_run(tmp_path)
    write_corpus(tmp_path / "one.jsonl", documents=20_000, first=0)
    command = [*mpirun_command(3), *command_with_parts(100_000), "prepare", str(run_file)]
    with subprocess.Popen(command, env=os.environ | _AS_ROOT, stderr=subprocess.PIPE, text=True) as job:
        deadline = time.monotonic() + HANGS_SECONDS
        while not list((tmp_path / "data").glob("sources/one/tokens.parts/000004")) and time.monotonic() < deadline:
            time.sleep(0.01)
        ranks = [rank for rank in psutil.Process(job.pid).children(recursive=True) if "prepare" in rank.cmdline()]
        max(ranks, key=lambda rank: rank.pid).kill()
        job.communicate(timeout=HANGS_SECONDS)
    assert job.returncode != 0
    assert not (tmp_path / "data" / "manifest.json").exists()
    done = process(command, **_AS_ROOT)
    resumed = next(line for line in done.stderr.splitlines() if line.startswith("one: tokenising"))
    assert not resumed.startswith("one: tokenising  0 %")
    monkeypatch.setattr(source, "SMALLEST_PART_BYTES", 100_000)
    evenpack("prepare", run_file, f"data.prepared_dir={tmp_path / 'alone'}")
    assert contents(tmp_path / "data") == contents(tmp_path / "alone")


@pytest.mark.slow
def test_a_mistake_under_mpirun_is_reported_once_and_ends_every_rank(run_file: Path, tmp_path: Path) -> None:
    prepared = f"data.prepared_dir={tmp_path / 'data'}"
    done = mpirun(2, run_file, prepared, "data.sources.one.text_key=body", expected=2)
    assert done.stderr.count("existing keys: 'text'") == 1
    assert not (tmp_path / "data").exists()


def test_workers_are_not_requested_under_mpirun(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
