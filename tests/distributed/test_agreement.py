"""Ranks agree before they join: on devices, versions, data and the run file; and each start meets by itself."""

import math
import os
import socket
import time
import traceback
from dataclasses import dataclass
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
from evenpack.errors import RunError, StoppedEarlyError
from evenpack.launch_environment import free_port


@dataclass(frozen=True, kw_only=True)
class Comer:
    """A rank that comes to the meeting, and its machine."""

    rank: int
    size: int
    port: int
    host: str
    facts: dict[str, str]
    patience_seconds: float

    def be(self) -> None:
        """Makes this process the rank."""
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port), "DS_ACCELERATOR": "cpu"}
        os.environ |= {"RANK": str(self.rank), "WORLD_SIZE": str(self.size), "LOCAL_RANK": "0"}
        socket.gethostname = lambda: self.host


def meet(answer: Connection, comer: Comer) -> None:
    """Meets and agrees as a rank does."""
    comer.be()
    try:
        meeting = Meeting("first", rank=comer.rank, size=comer.size, patience_seconds=comer.patience_seconds)
        again = Meeting("second", rank=comer.rank, size=comer.size, patience_seconds=60.0)
        require_agreement(again, comer.facts)
        answer.send((None, [meeting.id, again.id]))
    except Exception as error:
        answer.send((str(error), []))
    answer.recv()  # the store of rank 0 stays


def start(answer: Connection, rank: int, port: int, run_file: Path, seed: int) -> None:
    """Trains as one of two ranks, with a `seed` of its own."""
    Comer(rank=rank, size=2, port=port, host=f"node{rank + 1}", facts={}, patience_seconds=60.0).be()
    from evenpack.engine.train import train

    try:
        config = load_run_file(run_file, RunConfig, [f"run.seed={seed}"])
        train(config, stop_requested=lambda: False)
    except Exception as error:
        answer.send((type(error).__name__, str(error), torch.distributed.is_initialized()))
    answer.recv()


def meet_all(
    *facts: dict[str, str],
    hosts: tuple[str, ...],
    absent: int = 0,
    patience_seconds: float = 60.0,
) -> list[tuple[str | None, list[str]]]:
    """Returns the error and the ids of each rank."""
    context = fork_context()
    port = free_port()
    ends, processes = [], []
    for rank, (own, host) in enumerate(zip(facts, hosts, strict=True)):
        here, there = context.Pipe()
        comer = Comer(
            rank=rank,
            size=len(facts) + absent,
            port=port,
            host=host,
            facts=own,
            patience_seconds=patience_seconds,
        )
        processes.append(context.Process(target=meet, args=(there, comer)))
        processes[-1].start()
        there.close()
        ends.append(here)
    results: list[Any] = [end.recv() for end in ends]
    for end, process in zip(ends, processes, strict=True):
        end.send(None)
        process.join()
    return results


def test_ranks_that_agree_have_one_id_for_each_meeting() -> None:
    same = {"torch": "2.13.0"}
    results = meet_all(dict(same), dict(same), dict(same), hosts=("a", "a", "b"))
    assert [error for error, _ in results] == [None] * 3
    first, second = zip(*(ids for _, ids in results), strict=True)
    assert len(set(first)) == len(set(second)) == 1
    assert set(first) != set(second)


def test_ranks_that_differ_all_get_an_error_that_names_the_machines() -> None:
    facts = [{"device": "cuda"}, {"device": "cuda"}, {"device": "cpu"}]
    results = meet_all(*facts, hosts=("node1", "node1", "node2"))
    (message,) = {error for error, _ in results}
    assert message is not None
    assert "device: cuda on node1; cpu on node2" in message


def test_a_rank_that_does_not_come_is_named() -> None:
    results = meet_all({}, {}, hosts=("node1", "node1"), absent=1, patience_seconds=3.0)
    error = results[0][0]
    assert error is not None
    assert "rank 0 on node1 has waited 3 s for the others to start; rank 2 has not come" in error


def wait_in_vain(
    answer: Connection, rank: int, port: int, patience_seconds: float, stops_after_seconds: float = math.inf
) -> None:
    """Meets as one of three ranks, of which the third does not come, and ends."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    began: list[float] = []

    def stop_requested() -> bool:
        """Asks to stop so long after the first time that this was called without a store."""
        lost = any(frame.name == "_loss_explained" for frame in traceback.extract_stack())
        if lost and not began:
            began.append(time.monotonic())
        return bool(began) and time.monotonic() - began[0] > stops_after_seconds

    try:
        Meeting("start", rank=rank, size=3, patience_seconds=patience_seconds, stop_requested=stop_requested)
    except RunError as error:
        answer.send(str(error))


@pytest.mark.parametrize(
    ("stops_after_seconds", "message"),
    [(math.inf, "has lost the store in which the ranks meet"), (1.0, "the run was asked to stop before")],
)
def test_a_rank_that_loses_rank_0_in_the_meeting_says_so_unless_it_is_asked_to_stop(
    stops_after_seconds: float, message: str
) -> None:
    context, port = fork_context(), free_port()
    pipes = [context.Pipe() for _ in range(2)]
    for rank, (_, there) in enumerate(pipes):
        patience_seconds, stops = (3.0, math.inf) if rank == 0 else (60.0, stops_after_seconds)
        context.Process(target=wait_in_vain, args=(there, rank, port, patience_seconds, stops)).start()
        there.close()
    messages = [here.recv() for here, _ in pipes]
    assert "rank 2 has not come" in messages[0] or "2 have not come" in messages[0]
    assert message in messages[1]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stop_ends_the_wait_for_others(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 waits for rank 1, and rank 1 for a store that nobody holds."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    answers = iter([False, True, True])
    with pytest.raises(StoppedEarlyError, match="asked to stop before all ranks had come"):
        Meeting("start", rank=rank, size=2, stop_requested=lambda: next(answers))


def test_a_rank_that_comes_before_rank_0_waits_without_a_word_of_torch(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    with pytest.raises(RunError, match=r"has not reached rank 0 at 127\.0\.0\.1:[0-9]+ within 1\.5 s"):
        Meeting("start", rank=1, size=2, patience_seconds=1.5)
    assert capfd.readouterr().err == ""


def test_ranks_with_other_run_files_are_refused_before_they_join(tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path / "run.yaml", run_values("gpt2", tmp_path))
    context, port = fork_context(), free_port()
    pipes = [context.Pipe() for _ in range(2)]
    for rank, (_, there) in enumerate(pipes):
        context.Process(target=start, args=(there, rank, port, run_file, 3 + rank)).start()
        there.close()
    results = [here.recv() for here, _ in pipes]
    for here, _ in pipes:
        here.send(None)
    for kind, message, is_initialized in results:
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
