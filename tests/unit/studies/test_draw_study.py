"""scripts/draw_study.py draws the committed results again."""

import runpy
import sys
from pathlib import Path

import pytest
from seen_figures import DrawnFigure

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks" / "results"


@pytest.mark.parametrize(
    ("result", "footer"),
    [
        ("equivalence_mini_cpu_2026-11-22", "equivalence_mini: data DATA; evenpack 0.1.0, commit 5dadf25ad4f7; CPU"),
        (
            "shuffle_mini_cpu_2026-11-26",
            "shuffle_mini: data corpus (3e9326d7e7d7, 116f5bc865ab, 8d1577b42ac1); evenpack",
        ),
    ],
    ids=["a file that does not say its origin", "one that does"],
)
def test_a_committed_result_is_drawn_again(
    result: str, footer: str, tmp_path: Path, drawn: list[DrawnFigure], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "figure.png"
    arguments = [str(RESULTS / f"{result}.json"), str(out), "--data", "DATA", "--device", "CPU"]
    monkeypatch.setattr(sys, "argv", ["draw_study.py", *arguments])
    runpy.run_path(str(ROOT / "scripts" / "draw_study.py"), run_name="__main__")
    assert out.read_bytes().startswith(b"\x89PNG")
    assert drawn[0].footer.startswith(footer)
    assert drawn[0].collisions == ()
