"""scripts/draw_study.py draws the committed results again."""

import runpy
import sys
from pathlib import Path

import pytest
from seen_figures import DrawnFigure

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks" / "results"


@pytest.mark.parametrize(("study", "commit"), [("equivalence_mini", "5dadf25ad4f7"), ("shuffle_mini", "527c3fed7454")])
def test_a_committed_result_is_drawn_again(
    study: str, commit: str, tmp_path: Path, drawn: list[DrawnFigure], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "figure.png"
    arguments = [str(RESULTS / f"{study}_cpu_2026-11-22.json"), str(out), "--data", "DATA", "--device", "CPU"]
    monkeypatch.setattr(sys, "argv", ["draw_study.py", *arguments])
    runpy.run_path(str(ROOT / "scripts" / "draw_study.py"), run_name="__main__")
    assert out.read_bytes().startswith(b"\x89PNG")
    assert drawn[0].footer.startswith(f"{study}: data DATA; evenpack 0.1.0, commit {commit}; CPU")
    assert drawn[0].collisions == ()
