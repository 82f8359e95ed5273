"""The files of committed runs are reported again by the code of today."""

import json
import tarfile
from pathlib import Path

import pytest
from repository import ROOT

from evenpack.console import save_json
from evenpack.studies.chunking.study import ChunkingStudy
from evenpack.studies.runs.runner import recorded

RESULTS = ROOT / "benchmarks/results"


SOURCE = "data.sources.wiki.path=wiki.train.jsonl.zst"


@pytest.mark.parametrize(
    ("name", "date", "runs_of"),
    [
        ("atom_size_mini", "2026-11-22", "atom_size_mini"),
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
    assert {key: found[key] for key in ("arms", "segments")} == {key: committed[key] for key in ("arms", "segments")}
