"""Metrics of runs: reductions, every key documented and no other, and a tracker that fails."""

import csv
import importlib.util
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import run_ranks
from pair_sources import pair_run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_training import MAX_SEQUENCE_LENGTH, changed, logged, never, numbered_lines, prepare_run, train_all

from evenpack.data.prepare.prepare import prepare
from evenpack.engine.config import RunConfig
from evenpack.engine.parts import metrics_writer, trackers
from evenpack.engine.provenance import commit_of_source
from evenpack.engine.reporting.definitions import _GATHERED_SPLIT, _SPLIT, DEFINITIONS, find_metric, scalars, values_of
from evenpack.engine.reporting.metrics import read_metrics
from evenpack.engine.reporting.rank_waits import Arrival
from evenpack.engine.reporting.run_record import read_run_record
from evenpack.engine.reporting.step_totals import RankValue, reduce_over_ranks
from evenpack.engine.train import train_in
from evenpack.engine.world.distributed import World
from evenpack.errors import ConfigError


class Breaks:
    """A tracker whose service fails at step 2."""

    def write(self, step: int, values: Mapping[str, int | float]) -> None:
        if step == 2:
            raise ConnectionError("the service went away")

    def flush(self) -> None: ...

    def close(self, *, failed: bool) -> None: ...


def runs_of_all_kinds(folder: Path) -> dict[str, RunConfig]:
    """Returns runs that together log every possible value; `tracked` has the trackers."""
    length = MAX_SEQUENCE_LENGTH
    trained = {"steps": 4, "evaluate_every_steps": 2, "log_rank_times_every_steps": 2}
    plain = prepare_run(folder / "plain", {"lines": numbered_lines(200)}, **trained)
    held_out = {"validation_fraction": 0.2, "prepared_dir": folder / "held_out"}
    tracked = changed(
        plain,
        run={"output_dir": folder / "tracked"},
        data=held_out,
        training={"skip_steps": [3]},
        metrics={"csv": True, "tensorboard": True, "wandb": {"mode": "offline"}},
    )
    rows = {"kind": "padding", "max_sequence_length": length, "atom": length, "isolate_documents": False}
    padded = changed(
        plain,
        run={"output_dir": folder / "padded"},
        data={"recipe": rows, "pack_length": length, "prepared_dir": folder / "rows"},
        training={"checkpoint_every_steps": 1},
    )
    pairs = changed(pair_run(folder / "pairs"), run={"output_dir": folder / "bert"}, training=trained)
    runs = {"tracked": tracked, "padded": padded, "pairs": pairs}
    for config in runs.values():
        prepare(config.data, config.prepared_dir)
    return runs


def train_and_listen(world: World, runs: dict[str, RunConfig]) -> list[str]:
    """Trains the runs with a known device peak, as on GPUs; returns the warnings."""
    metrics_writer.peak_flops = lambda config, world: 1e9
    trackers._OPENERS["wandb"] = lambda value, run: Breaks()
    stopped = changed(runs["tracked"], training={"stop_after_steps": 1})
    with logged(level=logging.WARNING) as warnings:
        train_all(world, [stopped, *runs.values()])
    find = importlib.util.find_spec
    importlib.util.find_spec = lambda name, package=None: None if name == "tensorboard" else find(name, package)
    refused = changed(runs["tracked"], run={"output_dir": runs["tracked"].run.output_dir / "refused"})
    with pytest.raises(ConfigError, match="the package tensorboard is not installed"):
        train_in(world, refused, stop_requested=never)
    assert list(refused.run.output_dir.iterdir()) == [], "nothing has begun"
    return warnings


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Returns the folder of the runs, and the warnings of rank 0."""
    folder = tmp_path_factory.mktemp("tracked")
    (folder / "plain").mkdir()
    (folder / "pairs").mkdir()
    warnings, _ = run_ranks(train_and_listen, 2, runs_of_all_kinds(folder))
    return folder, warnings


def test_every_key_that_runs_write_is_documented_and_none_other(trained: tuple[Path, list[str]]) -> None:
    folder, _ = trained
    logs = [read_metrics(folder / name / "metrics.jsonl") for name in ("tracked", "padded", "bert")]
    written = {find_metric(path).name for log in logs for record in log for path, _ in values_of(record)}
    elsewhere = {"skipped/not_finite", "checkpoint/failed"}  # see `test_bad_steps.py` and `test_failed_saves.py`
    elsewhere |= {"left_eager"}  # of compiled runs: see `test_compiled_training.py`
    elsewhere |= {"ranks/pairs_within/WINDOW"}  # of models with windows: see `test_rank_times.py`
    elsewhere |= {"left_out/SOURCE/packs", "left_out/SOURCE/epochs"}  # of stages: see `test_rebuilt_stages.py`
    split = {metric.name for metric in DEFINITIONS if metric.when in (_SPLIT, _GATHERED_SPLIT)}
    elsewhere |= split  # of longer runs: see `test_slow_ranks.py`
    assert {metric.name for metric in DEFINITIONS} == written | elsewhere
    assert not written & elsewhere


def test_a_tracker_that_fails_is_warned_of_once_and_the_run_and_the_others_continue(
    trained: tuple[Path, list[str]],
) -> None:
    folder, warnings = trained
    found = [message for message in warnings if "metrics." in message]
    assert len(found) == 1
    assert found[0].startswith("metrics.wandb failed (ConnectionError: the service went away)")
    records = read_metrics(folder / "tracked" / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert "skipped" in records[2]
    with (folder / "tracked" / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    told = [scalars(record) for record in records]
    assert [{name: float(value) for name, value in row.items() if value and name != "step"} for row in rows] == told
    events = EventAccumulator(str(folder / "tracked" / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    for name in told[0]:
        expected = [(one["step"], values[name]) for one, values in zip(records, told, strict=True) if name in values]
        assert [(event.step, pytest.approx(event.value)) for event in events.Scalars(name)] == expected


@dataclass(frozen=True, kw_only=True)
class Added:
    """Values of a rank that are added."""

    tokens: tuple[int, ...]
    correct: Mapping[str, RankValue]
    seconds: float


def reduced(world: World) -> tuple[Any, Any]:
    """Reduces values that differ by rank."""
    waits = Arrival(planned=2.0 * world.rank, expected=1.0, compute=0.0, arrival=1.0 - world.rank)
    cut = Added(tokens=(10 + world.rank, 7), correct={"one": torch.tensor(3)}, seconds=float(world.rank))
    return reduce_over_ranks(world, cut, waits)


def test_sums_and_maxima_are_over_all_ranks() -> None:
    expected = (
        Added(tokens=(21, 14), correct={"one": 6}, seconds=1.0),
        Arrival(planned=2.0, expected=1.0, compute=0.0, arrival=1.0),
    )
    assert run_ranks(reduced, 2) == [expected, expected]


def test_a_run_says_where_each_start_of_it_ran(trained: tuple[Path, list[str]]) -> None:
    folder, _ = trained
    tracked, padded = (read_run_record(folder / name) for name in ("tracked", "padded"))
    assert tracked is not None
    assert padded is not None
    assert [(start.steps_done, start.ranks) for start in tracked.starts] == [(0, 2), (1, 2)]
    assert tracked.starts[0].device.startswith("CPU (")
    assert tracked.starts[0].commit == commit_of_source()
    assert tracked.config["training"]["stop_after_steps"] is None, "as the newest start has it"
    assert tracked.data.sources == ("lines",)
    assert tracked.data.fingerprint != padded.data.fingerprint
    assert tracked.data.pack_length == MAX_SEQUENCE_LENGTH
