"""Runs over the same data for the study of waiting, of packs and padded; neither has trained."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from run_files import changed
from tiny_run import tiny_gpt2_run

from evenpack.data.packing import LengthHistogram, Packing
from evenpack.engine.config import RunConfig
from evenpack.studies.imbalance import study as study_module
from evenpack.studies.imbalance.simulation import Simulation, make_cluster, simulate

_SIMULATED: list[Simulation] = []
PADDED = {
    "layout": "padded",
    "batching": "sequences",
    "packs_per_step": None,
    "packs_per_micro_batch": None,
    "sequences_per_step": 16,
    "sequences_per_micro_batch": 8,
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A prepared run of packs that has not trained."""
    return tiny_gpt2_run(tmp_path_factory.mktemp("run"))


@pytest.fixture
def simulated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates one and two devices a single time: here it matters what is simulated, and not with which result."""

    def quick(histogram: LengthHistogram, packing: Packing, **given: Any) -> Simulation:
        if not _SIMULATED:
            _SIMULATED.append(simulate(histogram, packing, **given))
        cluster = make_cluster(histogram, packing, cost=given["cost"], options=given["options"])
        return dataclasses.replace(
            _SIMULATED[0],
            options=given["options"],
            cost=given["cost"],
            packs_per_micro_batch=cluster.packs_per_micro_batch,
        )

    monkeypatch.setattr(study_module, "simulate", quick)


@pytest.fixture
def packed(config: RunConfig, tmp_path: Path) -> RunConfig:
    return changed(
        config,
        run={"name": "packed", "output_dir": tmp_path / "packed"},
        data={"prepared_dir": config.prepared_dir},
    )


@pytest.fixture
def padded(packed: RunConfig, tmp_path: Path) -> RunConfig:
    return changed(packed, run={"name": "padded", "output_dir": tmp_path / "padded"}, training=PADDED)
