"""A process finds its rank, and a world of one works without a process group."""

import importlib.util
import logging
import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from run_files import run_config, run_values

from evenpack.engine.train import train
from evenpack.engine.world.distributed import (
    World,
    complete_environment,
    configure_logging,
    quiet_deepspeed,
    require_shared_directory,
)
from evenpack.errors import RunError

SOLO = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


def completed(environment: dict[str, str]) -> dict[str, str]:
    complete_environment(environment)
    return environment


def test_without_a_launcher_a_process_is_alone_at_a_port_of_its_own():
    environment = completed({"PATH": "/bin"})
    assert (environment["RANK"], environment["WORLD_SIZE"], environment["LOCAL_RANK"]) == ("0", "1", "0")
    assert environment["MASTER_ADDR"] == "127.0.0.1"
    assert 1024 <= int(environment["MASTER_PORT"]) < 65536
    assert environment["MASTER_PORT"] != "29500"


def test_what_deepspeed_and_torchrun_set_stays():
    given = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}
    assert completed(dict(given)) == given


@pytest.mark.parametrize("launcher", [OPEN_MPI, MPICH])
def test_mpi_ranks_of_one_machine_find_each_other_without_mpi4py(launcher: dict[str, str]):
    environment = completed(dict(launcher))
    assert (environment["RANK"], environment["WORLD_SIZE"], environment["LOCAL_RANK"]) == ("1", "2", "1")
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("127.0.0.1", "29500")


def test_mpi_ranks_of_several_machines_use_the_address_they_are_given():
    environment = completed(OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "77"})
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("10.0.0.1", "77")


def test_mpi_ranks_of_several_machines_without_an_address_leave_it_to_mpi4py(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "mpi4py" else None)
    assert "MASTER_ADDR" not in completed(OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "4"})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RunError, match="4 ranks need the address of the first one"):
        complete_environment(OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "4"})


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "2 ranks need the address of the first one"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "sets RANK, WORLD_SIZE but not LOCAL_RANK"),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "3"}, "let srun start one task on each machine"),
    ],
)
def test_ranks_do_not_each_become_alone(environment: dict[str, str], message: str):
    with pytest.raises(RunError, match=message):
        completed(environment)
    assert completed({"SLURM_STEP_NUM_TASKS": "1"})["WORLD_SIZE"] == "1"


def test_a_world_of_one_needs_no_process_group():
    vector = torch.tensor([1.5, 2.0], dtype=torch.float64)
    assert SOLO.is_main
    assert SOLO.all_sum(vector).tolist() == [1.5, 2.0]
    assert SOLO.all_gather("word") == ["word"]
    assert SOLO.broadcast("word") == "word"
    assert SOLO.on_main(lambda: None) is None
    SOLO.barrier()


def test_sums_and_maxima_are_on_their_way_before_the_host_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that reads the sums first leaves the device idle until it has sent the maxima."""
    done: list[str] = []

    def reduce(part: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        done.append("maximum" if op == dist.ReduceOp.MAX else "sum")
        part.copy_(torch.maximum(part, other[-len(part) :]) if op == dist.ReduceOp.MAX else part + other[: len(part)])

    def read(tensor: torch.Tensor) -> torch.Tensor:
        done.append("wait")
        return tensor

    other = torch.tensor([10.0, 20.0, 3.0], dtype=torch.float64)
    monkeypatch.setattr(dist, "all_reduce", reduce)
    monkeypatch.setattr(torch.Tensor, "cpu", read)
    mine = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    assert replace(SOLO, size=2).all_sum(mine, maxima=1).tolist() == [11.0, 22.0, 4.0]
    assert done == ["sum", "maximum", "wait"]
    assert mine.tolist() == [1.0, 2.0, 4.0]


def test_the_output_directory_is_made_and_left_empty(tmp_path):
    require_shared_directory(tmp_path / "new" / "out", SOLO)
    assert list((tmp_path / "new" / "out").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"file/out cannot be written: .* run\.output_dir"):
        require_shared_directory(tmp_path / "file" / "out", SOLO)


def test_news_come_from_rank_0_and_warnings_from_every_rank_by_number(capsys: pytest.CaptureFixture[str]):
    for rank in (0, 2):
        configure_logging(World(rank=rank, size=3, local_rank=rank, device=torch.device("cpu")))
        logging.getLogger("evenpack.engine.train").info("news")
        logging.getLogger("evenpack.engine.train").warning("warning")
    assert capsys.readouterr().err.splitlines() == ["news", "warning", "rank 2: warning"]


def test_collectives_wait_for_as_long_as_a_rank_may_work_without_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Torch's limit of half an hour would end a run whose rank 0 reads a file for longer; heartbeats judge that."""
    environment = completed({**os.environ, "DS_ACCELERATOR": "cpu"})
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    asked: list[timedelta] = []

    def init(*_: object, timeout: timedelta, **__: object) -> None:
        asked.append(timeout)
        raise RunError("far enough")

    monkeypatch.setattr(quiet_deepspeed(), "init_distributed", init)
    with pytest.raises(RunError, match="far enough"):
        train(run_config(run_values("gpt2", tmp_path)), stop_requested=lambda: False)
    assert asked[0] >= timedelta(days=1)
