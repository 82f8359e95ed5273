"""Ranks agree before they join: on devices, versions, data and the run file; and each start meets by itself."""

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import fork_context
from run_files import run_values, write_run_file

import evenpack
from evenpack.config import load_run_file
from evenpack.engine.config import RunConfig
from evenpack.engine.train import run_facts
from evenpack.engine.world.agreement import (
    RankFacts,
    _source_checksum,
    find_differences,
    machine_facts,
    require_agreement,
)
from evenpack.engine.world.meeting import Meeting
from evenpack.errors import RunError
from evenpack.launch_environment import free_port


def become(rank: int, size: int, port: int, host: str) -> None:
    """Makes this process a rank on a machine of this name."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu"}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": "0"}
    socket.gethostname = lambda: host


def answers_of(target: Callable[..., None], *arguments: tuple[Any, ...]) -> list[Any]:
    """Returns what each of several processes answers; those that wait for a word stay until all have answered."""
    context, pipes, processes = fork_context(), [], []
    for given in arguments:
        pipes.append(context.Pipe())
        processes.append(context.Process(target=target, args=(pipes[-1][1], *given)))
        processes[-1].start()
        pipes[-1][1].close()
    answers = [here.recv() for here, _ in pipes]
    for (here, _), process in zip(pipes, processes, strict=True):
        with suppress(BrokenPipeError):
            here.send(None)
        process.join()
    return answers


def meet(answer: Connection, rank: int, size: int, port: int) -> None:
    """Meets twice and agrees, as a rank does; answers with the ids."""
    become(rank, size, port, host=f"node{rank}")
    first, second = (Meeting(name, rank=rank, size=size, patience_seconds=60.0) for name in ("first", "second"))
    require_agreement(second, {"torch": "2.13.0"})
    answer.send([first.id, second.id])
    answer.recv()  # the store of rank 0 stays


def test_ranks_that_agree_have_one_id_for_each_meeting() -> None:
    port = free_port()
    first, second = zip(*answers_of(meet, *((rank, 3, port) for rank in range(3))), strict=True)
    assert len(set(first)) == len(set(second)) == 1
    assert set(first) != set(second)


def wait_in_vain(answer: Connection, rank: int, port: int, patience_seconds: float) -> None:
    """Meets as one of three ranks, of which the last does not come, and ends."""
    become(rank, 3, port, host="node")
    try:
        Meeting("start", rank=rank, size=3, patience_seconds=patience_seconds)
    except RunError as error:
        answer.send(str(error))


def test_ranks_name_the_one_that_does_not_come_and_the_loss_of_rank_0() -> None:
    port = free_port()
    waiting, lost = answers_of(wait_in_vain, (0, port, 3.0), (1, port, 60.0))
    assert "rank 0 on node has waited 3 s for the others to start; " in waiting
    assert "rank 2 has not come" in waiting or "2 have not come" in waiting
    assert "has lost the store in which the ranks meet" in lost


def test_a_rank_that_comes_before_rank_0_waits_without_a_word_of_torch(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    with pytest.raises(RunError, match=r"has not reached rank 0 at 127\.0\.0\.1:[0-9]+ within 1\.5 s"):
        Meeting("start", rank=1, size=2, patience_seconds=1.5)
    assert capfd.readouterr().err == ""


def start(answer: Connection, rank: int, port: int, run_file: Path) -> None:
    """Trains as one of two ranks, with a seed of its own."""
    become(rank, 2, port, host=f"node{rank + 1}")
    from evenpack.engine.train import train

    try:
        train(load_run_file(run_file, RunConfig, [f"run.seed={3 + rank}"]), stop_requested=lambda: False)
    except Exception as error:
        answer.send((type(error).__name__, str(error), torch.distributed.is_initialized()))
    answer.recv()


def test_ranks_with_other_run_files_are_refused_before_they_join(tmp_path: Path) -> None:
    run_file, port = write_run_file(tmp_path / "run.yaml", run_values("gpt2", tmp_path)), free_port()
    for kind, message, is_initialized in answers_of(start, (0, port, run_file), (1, port, run_file)):
        assert (kind, is_initialized) == ("RunError", False)
        assert "run.seed: 3 on node1; 4 on node2\n" in message


def test_each_difference_is_named_by_machine_or_by_rank() -> None:
    def rank(number: int, host: str, **facts: str) -> RankFacts:
        return RankFacts(rank=number, host=host, facts=facts)

    ranks = [
        rank(0, "a", torch="2.13", threads="1", seed="5"),
        rank(1, "a", torch="2.13", threads="2", seed="5"),
        rank(2, "b", torch="2.12", threads="1", seed="5"),
        rank(3, "c", torch="2.13", threads="1", seed="5", NCCL="2.27"),
    ]
    assert list(find_differences(ranks)) == [
        "torch: 2.13 on a, c; 2.12 on b",
        "threads: 1 on rank 0 (a), rank 2 (b), rank 3 (c); 2 on rank 1 (a)",
        "NCCL: nothing on a, b; 2.27 on c",
    ]
    assert list(find_differences(ranks[:1] * 4)) == []


def test_run_file_overrides_and_prepared_data_are_facts(tmp_path: Path) -> None:
    path = write_run_file(tmp_path / "run.yaml", run_values("gpt2", tmp_path))
    facts = run_facts(load_run_file(path, RunConfig, ["training.packs_per_step=16"]))
    assert facts["training.packs_per_step"] == "16"
    assert facts[f"prepared data in {tmp_path / 'data'}"] == "No such file or directory"
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "manifest.json").write_text("{}")
    before = run_facts(load_run_file(path, RunConfig))
    (tmp_path / "data" / "manifest.json").write_text("{ }")
    after = run_facts(load_run_file(path, RunConfig))
    assert [name for name in before if before[name] != after[name]] == [f"prepared data in {tmp_path / 'data'}"]


def test_software_is_a_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = machine_facts("cpu")
    assert facts["device"] == "cpu"
    assert facts["evenpack"].endswith(_source_checksum(Path(evenpack.__file__).parent)), "the code of all packages"
    assert set(facts) == {"device", "Python", "torch", "deepspeed", "numpy", "evenpack"}
    monkeypatch.setattr("evenpack.engine.world.agreement.nccl.version", lambda: (2, 27, 3))
    assert machine_facts("cuda")["NCCL"] == "2.27.3"
    assert "flash-attn" in machine_facts("cuda"), "attention.backend=auto goes by it"
    assert {"CUDA of torch", *facts} < set(machine_facts("cuda"))
