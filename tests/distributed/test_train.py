"""The training loop on several ranks: they stop together, agree on their data, and record the whole step."""

import json
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked_ranks import run_ranks
from slow_cases import slow_but
from tiny_training import (
    MAX_SEQUENCE_LENGTH,
    beside,
    changed,
    checkpoints,
    exact,
    never,
    numbered_lines,
    prepare_run,
    stop_after,
)
from windowed_models import layers_with_windows, with_windows

from evenpack.data.prepare.prepare import prepare
from evenpack.data.prepared import PreparedData
from evenpack.engine.build import build_at, find_start
from evenpack.engine.config import RunConfig
from evenpack.engine.parts.metrics_writer import step_record
from evenpack.engine.reporting.metrics import read_metrics
from evenpack.engine.reporting.step_totals import sum_over_ranks
from evenpack.engine.resolving.resolve import open_run
from evenpack.engine.train import TrainOutcome, train_in
from evenpack.engine.world.distributed import World, require_shared_directory
from evenpack.errors import RunError
from evenpack.models.common.loss_sums import exact_denominators
from evenpack.models.cost import Work, step_flops
from evenpack.visible_pairs import total_pairs_within


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return prepare_run(tmp_path_factory.mktemp("train"), {"lines": numbered_lines()})


@contextmanager
def order_of_writes() -> Iterator[list[tuple[str, int]]]:
    """Records what this process flushes of metrics.jsonl, up to which step, and the checkpoints that it publishes."""
    written: list[tuple[str, int]] = []
    fsync, rename = os.fsync, os.rename

    def watched_fsync(descriptor: int) -> None:
        fsync(descriptor)
        path = Path(f"/dev/fd/{descriptor}").readlink()
        if path.name == "metrics.jsonl":
            written.append((path.name, read_metrics(path)[-1]["step"]))

    def watched_rename(source: Path, target: Path) -> None:
        rename(source, target)
        if target.name.startswith("step_"):
            written.append(("checkpoint", int(target.name.removeprefix("step_"))))

    os.fsync, os.rename = watched_fsync, watched_rename
    try:
        yield written
    finally:
        os.fsync, os.rename = fsync, rename


def stop_and_go_on(world: World, straight: RunConfig, stopped: RunConfig) -> list[TrainOutcome]:
    """Trains a whole run; one stopped by a request on rank 1 alone and resumed; and one with nothing to do."""
    with order_of_writes() as written:
        finished = train_in(world, straight, stop_requested=never)
    assert written == ([("metrics.jsonl", 6), ("checkpoint", 6)] if world.is_main else [])
    outcomes = [
        finished,
        train_in(world, stopped, stop_requested=stop_after(3) if world.rank == 1 else never),
        train_in(world, stopped, stop_requested=never),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("evenpack.engine.train.build_at", None)  # a run that is done builds no model
        return [*outcomes, train_in(world, stopped, stop_requested=never)]


@pytest.mark.parametrize("stage", slow_but([3], range(4)))
def test_one_rank_that_is_asked_stops_all_and_the_run_resumes_bit_for_bit(config: RunConfig, stage: int):
    straight, stopped = (
        beside(config, f"{name}_{stage}", model={"dropout": 0.1}, deepspeed={"zero_stage": stage})
        for name in ("straight", "stopped")
    )
    for outcomes in run_ranks(stop_and_go_on, 2, straight, stopped):
        assert [(outcome.state, outcome.step) for outcome in outcomes] == [
            ("finished", 6),
            ("stopped", 3),
            ("finished", 6),
            ("finished", 6),
        ]
    assert exact(stopped) == exact(straight)
    assert [record[0] for record in exact(straight)] == [1, 2, 3, 4, 5, 6]
    assert checkpoints(stopped.run.output_dir) == ["latest", "step_000003", "step_000006"]
    assert json.loads((stopped.run.output_dir / "summary.json").read_text())["state"] == "finished"


def disagree(world: World, config: RunConfig, folder: Path) -> list[str]:
    """Returns the errors of ranks with different data."""
    with pytest.raises(RunError) as directory:
        require_shared_directory(folder / f"machine_{world.rank}", world, patience_seconds=0.5)
    with pytest.raises(RunError) as data:  # the seed is in the fingerprint, as the files are
        find_start(open_run(changed(config, run={"seed": world.rank})), world)
    run = build_at(find_start(open_run(config), world))
    batches = next(run.start.batches(stop_step=1))
    if world.rank == 1:
        counts = batches.micro_batches[0].local_counts
        wrong = replace(batches.micro_batches[0], local_counts=replace(counts, targets=counts.targets + 1))
        batches = replace(batches, micro_batches=(wrong, *batches.micro_batches[1:]))
    local = run.engine.train_step(0, batches.micro_batches)
    with pytest.raises(RunError) as plan:
        sum_over_ranks(
            world,
            batches,
            local,
            exact_denominators(config.model.losses, batches.counts),
            stop=False,
            loader_seconds=0.0,
        )
    return [str(directory.value), str(data.value), str(plan.value)]


def test_ranks_that_do_not_see_the_same_files_or_plan_get_an_error(config: RunConfig, tmp_path: Path):
    for directory, data, plan in run_ranks(disagree, 2, config, tmp_path):
        assert "cannot see the files of" in directory
        assert "ranks [1] have another seed or other prepared data" in data
        assert "the plan of rank" in plan
        assert "the ranks together collated" in plan


def records_of_a_step(world: World, config: RunConfig) -> list[dict[str, Any]]:
    """Returns one step's record with a known device peak, and without."""
    run = build_at(find_start(open_run(config), world))
    batches = next(run.start.batches(stop_step=1))
    local = run.engine.train_step(0, batches.micro_batches)
    if not world.is_main:  # only that of rank 0 counts
        local = replace(local, gradient_norm=torch.tensor(math.inf))
    denominators = exact_denominators(config.model.losses, batches.counts)
    totals = sum_over_ranks(world, batches, local, denominators, stop=False, loader_seconds=float(world.rank))
    return [
        step_record(run.start, 1, totals, learning_rate=0.5, step_seconds=2.0, peak_flops=peak) for peak in (1e9, None)
    ]


def test_a_record_says_what_the_step_was_over_all_ranks(config: RunConfig, tmp_path: Path):
    (record, without_peak), other = run_ranks(records_of_a_step, 2, changed(config, run={"output_dir": tmp_path}))
    assert other == [record, without_peak], "both ranks know the same"
    assert record["slots"] == 8 * MAX_SEQUENCE_LENGTH
    assert record["padding_share"] == 1.0 - record["tokens"] / record["slots"]
    assert record["targets"] == record["tokens"] - record["sequences"], "the last token of a sequence predicts nothing"
    assert record["source_tokens"] == {"lines": record["tokens"]}
    assert record["tokens_per_second"] == record["tokens"] / 2.0
    assert record["slots_per_second"] == record["slots"] / 2.0
    assert re.fullmatch("[0-9a-f]{16}", record["order_hash"])
    assert record["loss"] == pytest.approx(math.log(260), abs=0.3), "weights at the start know nothing"
    assert 0.0 < record["compute_seconds_mean"] <= record["compute_seconds_max"]
    assert record["loader_seconds"] == 0.5
    assert math.isfinite(record["gradient_norm"])
    assert 0.0 < record["mfu"] < 1.0
    assert without_peak == {name: value for name, value in record.items() if name != "mfu"}
    assert not {"padding_targets", "loss_per_real_target"} & record.keys()


def record_of_rows(world: World, config: RunConfig) -> tuple[dict[str, Any], float]:
    """Returns the record of a step of two layers, one with a window, and its utilisation by the real lengths."""
    with layers_with_windows():
        model = with_windows(config.model, (None, 3))
        record, _ = records_of_a_step(world, config.model_copy(update={"model": model}))
        view = PreparedData.open(config.prepared_dir, config.data).view("lines", "train")
        lengths = view.read(np.arange(8)).counts.real_lengths
        work = Work(
            slots=record["tokens"],
            squared_lengths=int((lengths**2).sum()),
            head_slots=record["targets"] - record["padding_targets"],
            sequences=8,
            pairs_within=total_pairs_within(lengths, (3,)),
        )
        return record, step_flops(model, vocabulary_size=260, work=work) / 2e9


@pytest.mark.slow
def test_a_record_distinguishes_predicted_padding(config: RunConfig, tmp_path: Path):
    length = MAX_SEQUENCE_LENGTH
    recipe = {"kind": "padding", "max_sequence_length": length, "atom": length, "isolate_documents": False}
    rows = changed(
        config,
        run={"output_dir": tmp_path},
        data={"recipe": recipe, "pack_length": length, "prepared_dir": tmp_path / "data"},
    )
    prepare(rows.data, rows.prepared_dir)
    for record, utilisation in run_ranks(record_of_rows, 2, rows):
        assert record["targets"] == 8 * (length - 1)
        assert record["padding_targets"] == record["slots"] - record["tokens"] > 0
        real = record["targets"] - record["padding_targets"]
        assert record["loss_per_real_target"] * real == pytest.approx(record["loss"] * record["targets"])
        assert record["mfu"] == pytest.approx(utilisation)
