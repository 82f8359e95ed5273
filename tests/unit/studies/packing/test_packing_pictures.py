"""The pictures of docs/packing.md agree with the packers."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from evenpack.data.packing import ALGORITHMS

ROOT = Path(__file__).parents[4]
PICTURES = ROOT / "docs" / "packing"
RESULTS = ROOT / "benchmarks" / "results"
NAMES = sorted([*ALGORITHMS, "sorted_batches"])
BY_A_SOLVER = {"cutting_stock", "least_squares", "least_squares_padding"}
"""Of equally good mixtures, another machine's linear algebra may choose another."""


def draw(*arguments: str) -> None:
    script = str(ROOT / "scripts" / "draw_packing.py")
    done = subprocess.run(
        [sys.executable, script, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},  # this checkout, wherever evenpack is installed from
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    draw("algorithms", str(folder))
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_the_committed_picture_is_what_the_code_draws(drawn: Path, name: str) -> None:
    now = (drawn / f"{name}.svg").read_text(encoding="utf-8")
    committed = (PICTURES / f"{name}.svg").read_text(encoding="utf-8")
    if name in BY_A_SOLVER:
        now, committed = (re.findall("<text.*?</text>", picture)[0] for picture in (now, committed))
        assert "packs" in now
    assert now == committed, f"docs/packing/{name}.svg is out of date: run `python scripts/draw_packing.py algorithms`"


@pytest.mark.slow
def test_the_certified_table_can_be_drawn_again(tmp_path: Path) -> None:
    newest = max(RESULTS.glob("packing_cpu_*.json"))
    draw("certified", str(newest), str(tmp_path / "certified.png"), "--measured", "COMMIT")
    assert (tmp_path / "certified.png").read_bytes().startswith(b"\x89PNG\r\n")
