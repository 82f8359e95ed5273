"""The comparison with loaders of other packages: what it finds in the rows that a rank read, and the command."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from repository import ROOT

PEERS = ROOT / "benchmarks/peers"
BEGIN, END, PADDING = 1, 2, 0
DOCUMENTS = [[BEGIN, *range(10 * i, 10 * i + 9), END] for i in range(1, 9)]
"""Eight documents of eleven tokens, all different."""


@pytest.fixture(scope="module")
def peers() -> Iterator[Any]:
    """Imports the benchmark's modules, which are not part of the package."""
    before = set(sys.modules)
    sys.path.insert(0, str(PEERS))
    import environments
    import loaders
    import peer_loaders
    import records

    yield SimpleNamespace(environments=environments, loaders=loaders, peer_loaders=peer_loaders, records=records)
    sys.path.remove(str(PEERS))
    for name in ("environments", "loaders", "peer_loaders", "records"):
        if name not in before:
            del sys.modules[name]


def record(
    peers: Any, folder: Path, micro_batches: list[list[list[int]]], *, in_step: int = 1, positions: bool = True
) -> Any:
    """Returns what a rank read, through the file: rows of tokens by micro-batch; positions restart with documents."""
    recorder = peers.records.Recorder()
    for rows in micro_batches:
        arrays = [np.array(row) for row in rows]
        restarting = [np.array(restarts(row)) for row in rows] if positions else None
        recorder.add(peers.peer_loaders.Rows(tokens=arrays, positions=restarting))
    recorder.save(folder / "record.npz")
    return peers.records.Record.read(folder / "record.npz", micro_batches=in_step, begin=BEGIN, padding=PADDING)


def restarts(row: list[int]) -> list[int]:
    found: list[int] = []
    for slot, token in enumerate(row):
        starts = token == BEGIN or slot == 0 or (token == PADDING and row[slot - 1] != PADDING)
        found.append(0 if starts else found[-1] + 1)
    return found


def joined(*numbers: int) -> list[int]:
    """Returns a row of these documents."""
    return [token for number in numbers for token in DOCUMENTS[number]]


def test_text_that_is_missing_or_repeated_is_found_wherever_rows_end(peers: Any, tmp_path: Path) -> None:
    documents = record(peers, tmp_path, [[joined(*range(8))]], positions=False)
    stream = joined(*range(8))

    def covered(*micro_batches: list[list[int]], positions: bool = True) -> dict[str, float]:
        return peers.records.coverage(
            [record(peers, tmp_path, list(micro_batches), positions=positions)], documents, END
        )

    assert covered([joined(3, 0), joined(1, 2)], [joined(7, 6, 5, 4)]) == {"read": 1, "repeated": 0}
    assert covered([stream[:30], stream[30:50]], [stream[50:]], positions=False) == {"read": 1, "repeated": 0}
    assert covered([joined(3, 0), joined(1, 2) + [PADDING] * 9]) == {"read": 0.5, "repeated": 0}
    # Of the eleven tokens of a repeated document the first seven are not found.
    assert covered([joined(0, 1, 2, 3, 4, 5, 6, 7), joined(0)]) == {"read": 1 + 5 / 72, "repeated": 4 / 72}


def test_steps_hold_the_same_text_in_whatever_order_and_on_whatever_ranks(peers: Any, tmp_path: Path) -> None:
    def steps(*ranks: list[list[list[int]]], in_step: int) -> Any:
        return peers.records.steps_of_ranks(
            [record(peers, tmp_path, micro_batches, in_step=in_step) for micro_batches in ranks]
        )

    one = steps([[joined(0, 1)], [joined(2)], [joined(3)], [joined(4, 5)]], in_step=2)
    two = steps([[joined(2)], [joined(4, 5)]], [[joined(1, 0)], [joined(3)]], in_step=1)
    other = steps([[joined(2)], [joined(4, 6)]], [[joined(1, 0)], [joined(3)]], in_step=1)
    assert peers.records.shared_steps(one, two) == 1
    assert peers.records.shared_steps(one, other) == 0.5
    assert peers.records.shared_steps(one, two[:1]) == 0.5


def test_squared_lengths_are_those_of_the_sequences_that_positions_show(peers: Any, tmp_path: Path) -> None:
    first, second = [[joined(0, 1)], [joined(0)]], [[joined(2) + [PADDING] * 11], [joined(0)]]
    shown = [record(peers, tmp_path, rank) for rank in (first, second)]
    hidden = [record(peers, tmp_path, rank, positions=False) for rank in (first, second)]
    balance = peers.records.balance
    assert balance(shown) == {"tokens": pytest.approx(22 / 16.5), "squared_lengths": pytest.approx(242 / 181.5)}
    assert balance(hidden)["squared_lengths"] == 1
    assert shown[0].borders_shown() == 1
    assert hidden[0].borders_shown() == 0
    assert record(peers, tmp_path, [[joined(0)]]).borders_shown() is None


def test_fill_counts_padding_and_the_largest_micro_batch(peers: Any, tmp_path: Path) -> None:
    read = record(peers, tmp_path, [[joined(0) + [PADDING] * 11], [joined(1, 2, 3, 4)], [joined(5)]])
    assert peers.records.fill([read]) == {
        "real_over_slots": pytest.approx(66 / 77),
        "largest_over_mean_micro_batch": pytest.approx(44 / 33),
    }


def test_the_rest_after_a_checkpoint_is_compared_token_for_token(peers: Any, tmp_path: Path) -> None:
    batches = [[joined(0)], [joined(1), joined(2)], [joined(3)], [joined(4)]]
    whole = record(peers, tmp_path, batches, in_step=2)
    assert whole.part(1, None).equals(record(peers, tmp_path, batches[2:], in_step=2))
    assert whole.part(0, 1).equals(record(peers, tmp_path, batches[:2], in_step=2))
    assert not whole.part(1, None).equals(record(peers, tmp_path, batches[:1:-1], in_step=2))
    assert not whole.part(0, 1).equals(record(peers, tmp_path, [[joined(0), joined(1)], [joined(2)]], in_step=2))


def test_a_model_leaks_without_positions_and_not_with_them(peers: Any, tmp_path: Path) -> None:
    task = SimpleNamespace(vocabulary=100)
    rows = [[[*joined(0), *joined(1), *joined(2)]]]
    shown, hidden = (record(peers, tmp_path, rows, positions=positions) for positions in (True, False))
    assert peers.loaders.leak(shown, {}, task) < 1e-6
    assert peers.loaders.leak(hidden, {}, task) > 1e-3
    assert peers.loaders.leak(shown, {"attention_mask": ""}, task) > 1e-3
    assert peers.loaders.leak(record(peers, tmp_path, [[joined(0)]]), {}, task) is None


def test_each_loader_has_an_environment_with_versions(peers: Any) -> None:
    own = {peer.environment for peer in peers.peer_loaders.PEERS.values()} - {"evenpack"}
    assert own < set(peers.environments.ENVIRONMENTS)
    assert set(peers.peer_loaders.MODULES) == {*own, "evenpack"}
    for name in own:
        assert all("==" in package for package in peers.environments.ENVIRONMENTS[name]["packages"])


def test_the_command_finds_evenpack_exact_on_one_and_two_ranks(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, str(PEERS / "loaders.py"), "--only", "evenpack", "--json", str(report)]
    settings = ["--documents", "200", "--pack-length", "256", "--rounds", "1", "--vocabulary", "512"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    finished = subprocess.run([*command, *settings], env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    found = json.loads(report.read_text())["loaders"]["evenpack"]
    assert "failed" not in found
    assert (found["borders_shown"], found["leak"], found["steps_shared_by_ranks"]) == (1, 0, 1)
    assert [found[f"epoch_{ranks}"]["read"] for ranks in (1, 2)] == [1, 1]
    for before in (1, 2):
        assert found[f"resume_{before}_{before}"]["same_token_for_token"]
        for ranks in (1, 2):
            resumed = found[f"resume_{before}_{ranks}"]
            assert (resumed["steps_of_uninterrupted"], resumed["read"], resumed["repeated"]) == (1, 1, 0)
    assert found["tokens_per_cpu_second"] > 0
