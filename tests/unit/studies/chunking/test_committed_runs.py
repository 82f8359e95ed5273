"""The files of committed runs are reported again by the code of today."""

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

from evenpack.console import save_json
from evenpack.studies.chunking.study import ChunkingStudy
from evenpack.studies.runs.runner import recorded

RESULTS = ROOT / "benchmarks/results"


SOURCE = "data.sources.wiki.path=wiki.train.jsonl.zst"


def leaves(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the values at all depths of JSON, each with its place."""
    if isinstance(value, dict | list):
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(one, f"{place}/{key}")
    else:
        yield place, value


def are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return one == pytest.approx(other, rel=1e-12, abs=1e-12, nan_ok=True)
    return bool(one == other)


@pytest.mark.parametrize(
    ("name", "date", "runs_of"),
    [
        ("atom_size_mini", "2026-11-28", "atom_size_mini"),
        ("isolation_mini", "2026-11-26", "isolation_mini"),
        ("isolation_mini_learned", "2026-11-26", "isolation_mini"),
    ],
)
def test_committed_runs_give_their_results_again(
    name: str, date: str, runs_of: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key that came later has its default; one that is renamed must be renamed in the archive.

    An archive may hold the runs and study files of several results.
    """
    with tarfile.open(RESULTS / f"{runs_of}_runs_cpu_{date}.tar.gz") as files:
        files.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    study = ChunkingStudy(Path(f"{name}_{date}.yaml"), [SOURCE])
    assert {one.state for one in recorded(study.runs)} == {"finished"}
    runs = {arm: {run.seed: run for run in study.compared if run.arm == arm} for arm in study.arms}
    save_json(study.compare(runs, ()).value, tmp_path / "found.json")
    paths = (tmp_path / "found.json", RESULTS / f"{name}_cpu_{date}.json")
    found, committed = (json.loads(path.read_text()) for path in paths)
    for key in ("arms", "segments"):  # Python 3.12 and later round sums of floats otherwise
        again, before = dict(leaves(found[key])), dict(leaves(committed[key]))
        assert again.keys() == before.keys()
        differing = {place: (one, before[place]) for place, one in again.items() if not are_equal(one, before[place])}
        assert differing == {}
