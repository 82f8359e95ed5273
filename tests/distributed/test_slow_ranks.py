"""Four ranks train, two of them with a fault: both are named, in their kind and in time, and no other rank."""

import sys
from pathlib import Path

import pytest
from repository import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from forked_ranks import run_ranks
from slow_ranks import RANKS, Fault, run_of, train_with_faults

from evenpack.engine.reporting.definitions import _GATHERED_SPLIT, _SPLIT, DEFINITIONS, find_metric, values_of
from evenpack.engine.reporting.metrics import METRICS, read_metrics
from evenpack.studies.waits import WaitsOfRun, read_waits

SLOW = Fault(name="constant 20 %", rank=2, first=240, last=299)
LATE = Fault(name="slow loader", rank=1, first=300, last=350, kind="loader")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[WaitsOfRun, Path]:
    config = run_of(tmp_path_factory.mktemp("slow_ranks"), steps=LATE.last)
    run_ranks(train_with_faults, RANKS, config, [SLOW, LATE])
    return read_waits(config.run.output_dir), config.run.output_dir


@pytest.mark.slow
def test_both_faults_are_named_where_they_are_and_no_other_rank(trained: tuple[WaitsOfRun, Path]) -> None:
    found, _ = trained
    assert [(one.rank, one.kind) for one in found.episodes] == [(2, "compute"), (1, "loader")]
    for fault, episode in zip((SLOW, LATE), found.episodes, strict=True):
        assert fault.first <= episode.named <= fault.last
        assert episode.slow_by == pytest.approx(fault.share(fault.first), rel=0.5)
        assert episode.host
    assert sum(part.share for part in found.parts) == pytest.approx(1.0)


@pytest.mark.slow
def test_a_run_writes_every_metric_of_waits(trained: tuple[WaitsOfRun, Path]) -> None:
    records = read_metrics(trained[1] / METRICS)
    written = {find_metric(path).name for record in records for path, _ in values_of(record)}
    assert {metric.name for metric in DEFINITIONS if metric.when in (_SPLIT, _GATHERED_SPLIT)} <= written
    assert "wait_plan_seconds" not in records[29]
    assert "wait_plan_seconds" in records[30]
