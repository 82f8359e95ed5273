"""Metrics of runs: every key documented and no other, and a tracker that fails."""

import csv
import importlib.util
import logging
from collections.abc import Mapping
from pathlib import Path

import pytest
from forked_ranks import run_ranks
from pair_sources import pair_run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_training import MAX_SEQUENCE_LENGTH, changed, logged, never, numbered_lines, prepare_run, train_all

from evenpack.data.prepare.prepare import prepare
from evenpack.engine.config import RunConfig
from evenpack.engine.parts import metrics_writer, trackers
from evenpack.engine.reporting.definitions import _GATHERED_SPLIT, _SPLIT, DEFINITIONS, find_metric, scalars, values_of
from evenpack.engine.reporting.metrics import read_metrics
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


@pytest.mark.slow
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


@pytest.mark.slow
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
