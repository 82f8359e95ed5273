"""The benchmark of peers checks every packer: its check, its processes, and its command."""

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

REPOSITORY = Path(__file__).parents[4]
PEERS = REPOSITORY / "benchmarks" / "peers"
LENGTHS = [5, 3, 3, 2, 6]


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports the benchmark's modules, which are not part of the package."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(PEERS))
    import contenders
    import task

    yield SimpleNamespace(contenders=contenders, task=task)
    for name in ("adapters", "contenders", "import_alone", "task"):
        if name not in before:
            del sys.modules[name]


def _check(peers: Any, packs: list[list[int]], holds: str = "sequences", depth: int | None = None) -> None:
    task = peers.task.Task(lengths=np.array(LENGTHS), pack_length=8, max_sequences_per_pack=depth)
    peers.task.Packed.from_lists(packs, holds).check(task)


def test_right_packs_pass_the_check(peers: Any) -> None:
    _check(peers, [[0, 1], [4, 3], [2]], depth=2)
    _check(peers, [[5, 3], [6, 2], [3]], holds="lengths")


@pytest.mark.parametrize(
    ("packs", "holds", "depth", "message"),
    [
        ([[0, 1], [4, 3]], "sequences", None, "each of 5 sequences"),
        ([[0, 1], [4, 3], [2, 2]], "sequences", None, "each of 5 sequences"),
        ([[0, 1], [4, 3], [5]], "sequences", None, "each of 5 sequences"),
        ([[0, 4], [1, 3], [2]], "sequences", None, "holds 11 tokens"),
        ([[0], [4], [1, 2, 3]], "sequences", 2, "holds 3 sequences"),
        ([[0, 1], [4, 3], [2], []], "sequences", None, "packs of 0 sequences"),
        ([[5, 3], [6, 2], [2]], "lengths", None, "each of 5 sequences"),
        ([[6, 3], [5, 2], [3]], "lengths", None, "holds 9 tokens"),
    ],
)
def test_a_wrong_packing_is_found(
    peers: Any, packs: list[list[int]], holds: str, depth: int | None, message: str
) -> None:
    with pytest.raises(peers.task.WrongPackingError, match=message):
        _check(peers, packs, holds, depth)


def test_a_packer_that_is_not_installed_says_how_to_install_it(peers: Any) -> None:
    contender = peers.contenders.Contender(
        name="none", load=lambda task: None, distribution="no-such-distribution", pip_options="--no-deps "
    )
    assert contender.version is None
    assert contender.how_to_install == "pip install --no-deps no-such-distribution"


def test_the_command_measures_evenpack_with_and_without_a_limit_of_depth() -> None:
    command = [sys.executable, str(PEERS / "packing.py"), "--json", "--sequences", "2e3", "--repeats", "1"]
    finished = subprocess.run(
        [*command, "--only", "evenpack longest"],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    free, limited = json.loads(finished.stdout)["rows"]
    assert [free["status"], limited["status"]] == ["checked", "checked"]
    assert (free["sequences"], free["depth"], limited["depth"], limited["deepest"]) == (2000, None, 3, 3)
    assert free["least_packs"] <= free["packs"] < limited["packs"]
    assert free["cpu_seconds"] > 0
    assert free["efficiency_percent"] == pytest.approx(100 * free["tokens"] / (512 * free["packs"]), abs=1e-4)
