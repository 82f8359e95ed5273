"""The line below a figure."""

import numpy as np
import pytest
from run_records import DATA, run_record, start

from evenpack.data.packing import LengthHistogram
from evenpack.engine.reporting.run_record import RunRecord, StartRecord
from evenpack.studies import provenance
from evenpack.studies.provenance import COMPUTED, name_of_lengths, provenance_line, provenance_of_runs
from evenpack.version import VERSION


def record(fingerprint: str = "0123456789abcdef", *starts: StartRecord) -> RunRecord:
    return run_record(*starts, data=DATA.model_copy(update={"fingerprint": fingerprint, "sources": ("wiki", "code")}))


def test_a_line_names_run_data_commit_and_device(monkeypatch: pytest.MonkeyPatch) -> None:
    line = provenance_of_runs("demo", [record()])
    assert line == "demo: data wiki, code (0123456789ab); evenpack 0.1, commit abc123; 2 x H100"
    lengths = LengthHistogram(counts=np.array([0, 1500]))
    monkeypatch.setattr(provenance, "commit_of_source", lambda: "1a2b")
    now = provenance_line("squad", data=name_of_lengths(lengths), device=COMPUTED)
    assert now == f"squad: data 1,500 sequences, 3,000 tokens; evenpack {VERSION}, commit 1a2b; computed, not measured"


def test_a_line_of_several_runs_and_starts_lists_what_differs_once() -> None:
    resumed = record("0123456789abcdef", start(), start(commit="def", ranks=4), start(commit=None, evenpack="0.2"))
    assert provenance_of_runs("study", [resumed, record("f" * 32), None]) == (
        "study: data wiki, code (0123456789ab, ffffffffffff); evenpack 0.1, 0.2, commits abc123, def and no checkout; "
        "2 x H100, 4 x H100; 1 of 3 runs have no record"
    )
    assert "data wiki, code (4 preparations);" in provenance_of_runs("recipes", [record(name) for name in "abcd"])


def test_a_line_says_what_is_not_recorded() -> None:
    assert provenance_of_runs("old", [None]) == "old: data, commit and device are not recorded"
    assert "; evenpack 0.1, no checkout; " in provenance_of_runs("wheel", [record("a", start(commit=None))])
