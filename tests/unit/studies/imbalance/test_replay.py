"""Clusters replayed on one device: its ranks are those of training, and a step is as long as the slowest of them."""

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from command_line import evenpack
from rich.console import Console
from slow_cases import slow_but

from evenpack.batch import PackedBatch
from evenpack.data.batches.pipeline import MicroBatchDataset, StepBatches, training_batches
from evenpack.engine.config import RunConfig
from evenpack.engine.resolving.resolve import ResolvedRun, resolve
from evenpack.engine.world.distributed import World
from evenpack.errors import ConfigError
from evenpack.models.cost import performed_work, useful_work
from evenpack.progress import Progress
from evenpack.studies.imbalance import study as study_module
from evenpack.studies.imbalance.cluster import (
    BALANCED_PACKS,
    BASELINE,
    PACKS_BY_ARRIVAL,
    UNPADDED_ARRIVAL,
    UNPADDED_BALANCED,
    ClusterOptions,
    Scheme,
)
from evenpack.studies.imbalance.replay import REPLAYED, Replay, VirtualRanks, replay
from evenpack.studies.throughput.contenders import changed, contender, run_to_measure, with_steps
from evenpack.studies.throughput.measure import MeasuredStep, StepTimer, micro_batches_of

BATCH, PACKS, STEPS = 6, 3, 4
UPDATE = 0.5


def known_cost(batch: PackedBatch) -> float:
    work = performed_work(batch)
    return 1e-3 + 2e-6 * work.slots + 3e-8 * work.squared_lengths


TimeStep = Callable[..., MeasuredStep]


def by_formula(real: TimeStep) -> TimeStep:
    """Returns the same with the time of micro-batches and updates replaced by those of a formula."""

    def time_step(self: StepTimer, batches: list[PackedBatch], *, loader_seconds: float = 0.0) -> MeasuredStep:
        step = real(self, batches, loader_seconds=loader_seconds)
        step.micro_batches.seconds[:] = [known_cost(batch) for batch in batches]
        return dataclasses.replace(step, update_seconds=UPDATE, all_reduce_seconds=0.0)

    return time_step


@pytest.fixture
def by_known_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepTimer, "time_step", by_formula(StepTimer.time_step))


def replayed(
    config: RunConfig, world: World, devices: tuple[int, ...], *, steps: int = STEPS, **options: Any
) -> Replay:
    return replay(
        config,
        world,
        devices=devices,
        steps=steps,
        options=ClusterOptions(batch=BATCH, **options),
        packs=PACKS,
        progress=Progress(Console(), silent=True),
    )


def trained(
    config: RunConfig, world: World, scheme: Scheme, ranks: int, *, steps: int = STEPS, **options: int
) -> np.ndarray:
    """Returns the seconds of each step's ranks and micro-batches, from the data set of a run on so many ranks."""
    run = run_to_measure(changed(config, deepspeed={"zero_stage": options.get("zero_stage", 0)}))
    each, accumulation = PACKS if scheme.batching == "packs" else BATCH, options.get("accumulation", 1)
    settled = with_steps(
        run.config, scheme.batching, scheme.layout, scheme.policy, each=each, per_step=ranks * accumulation * each
    )
    settings = dataclasses.replace(resolve(settled, run.prepared).pipeline_settings(world), ranks=ranks)
    seconds = np.empty((steps, ranks, accumulation))
    for rank in range(ranks):
        dataset = MicroBatchDataset(run.prepared, dataclasses.replace(settings, rank=rank))
        for item in range(steps * accumulation):
            seconds[item // accumulation, rank, item % accumulation] = known_cost(dataset[item])
    return seconds


@pytest.mark.slow
@pytest.mark.usefixtures("by_known_cost")
@pytest.mark.parametrize(
    "options",
    [{}, {"accumulation": 2}, {"accumulation": 2, "zero_stage": 2}],
    ids=["one", "two", "two at ZeRO 2"],
)
def test_a_step_is_the_slowest_of_the_ranks_that_a_run_would_have(
    config: RunConfig, world: World, options: dict[str, int]
) -> None:
    found = replayed(config, world, (1, 4), **options)
    assert found.update_seconds == UPDATE
    for scheme in REPLAYED:
        alone, four = found.of(scheme)
        assert (alone.devices, alone.steps, four.devices, four.steps) == (1, 4 * STEPS, 4, STEPS)
        assert alone.wait_share == 0
        seconds = trained(config, world, scheme, 4, **options)
        waited = seconds.max(axis=1).sum(axis=1) if options.get("zero_stage") else seconds.sum(axis=2).max(axis=1)
        mean = seconds.sum(axis=2).mean(axis=1)
        assert four.wait_share == pytest.approx((waited - mean).sum() / (waited + UPDATE).sum(), rel=1e-9)
        assert four.slowest_over_mean == pytest.approx(((waited + UPDATE) / (mean + UPDATE)).mean(), rel=1e-9)
    arrival, balanced = found.of(UNPADDED_ARRIVAL)[1], found.of(UNPADDED_BALANCED)[1]
    assert balanced.wait_share < 0.5 * arrival.wait_share
    assert found.of(BALANCED_PACKS)[1].wait_share < found.of(PACKS_BY_ARRIVAL)[1].wait_share < arrival.wait_share


@pytest.mark.slow
def test_rates_are_those_of_a_long_run(config: RunConfig, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the items of a few steps have more or less than the mean item is corrected for.

    Exactly, where seconds follow tokens and squared lengths, and on one device, where no maximum is taken.
    """
    monkeypatch.setattr(sys.modules[__name__], "known_cost", cost_of_tokens)
    monkeypatch.setattr(StepTimer, "time_step", by_formula(StepTimer.time_step))
    found = replayed(config, world, (1, 4))
    run = run_to_measure(config)
    lengths = run.prepared.view(run.prepared.source_names[0], "train").lengths().astype(np.float64)
    plan = (
        VirtualRanks(resolve(with_form(config, BALANCED_PACKS), run.prepared), world).dataset(1).planner.sources[0].plan
    )
    assert plan.sequences == len(lengths)
    per_pack = len(lengths) / plan.packs
    for scheme, sequences in ((UNPADDED_ARRIVAL, BATCH), (BALANCED_PACKS, PACKS * per_pack), (BASELINE, BATCH)):
        seconds = 1e-3 + sequences * (2e-6 * lengths.mean() + 3e-8 * (lengths**2).mean()) + UPDATE
        assert found.of(scheme)[0].sequences_per_second == pytest.approx(sequences / seconds, rel=1e-9), scheme.label
    for row in found.of(BASELINE):
        assert (row.speed_up, row.speed_up_low, row.speed_up_high) == (1.0, 1.0, 1.0)
    packs = found.of(BALANCED_PACKS)[1]
    assert packs.speed_up_low < packs.speed_up < packs.speed_up_high


@pytest.mark.parametrize("seed", slow_but([0], range(4)))
def test_two_steps_of_a_noisy_device_have_a_finite_speed_up(
    seed: int, config: RunConfig, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A regression through so few parts gives slopes of noise, which a linear correction takes below zero seconds."""
    noise = np.random.default_rng(seed)
    monkeypatch.setattr(sys.modules[__name__], "known_cost", lambda batch: noise.lognormal(sigma=2.0))
    monkeypatch.setattr(sys.modules[__name__], "UPDATE", 1e-3)
    monkeypatch.setattr(StepTimer, "time_step", by_formula(StepTimer.time_step))
    found = replayed(config, world, (1, 2), steps=2)
    for row in found.rows:
        assert row.sequences_per_second > 0
        assert 0 < row.speed_up_low <= row.speed_up <= row.speed_up_high < np.inf


def cost_of_tokens(batch: PackedBatch) -> float:
    return 1e-3 + 2e-6 * batch.local_counts.tokens + 3e-8 * useful_work(batch).squared_lengths


def test_what_is_replayed_and_profiled_is_a_runs_own_micro_batches(world: World, config: RunConfig) -> None:
    """All that a model reads, with as much room for segments: a kernel starts blocks for each empty one, too."""

    def read(batches: Sequence[PackedBatch]) -> list[list[Any]]:
        return [[tensor.tolist() for tensor in batch.moved_tensors] for batch in batches]

    def trained(run: ResolvedRun, step: int, **place: Any) -> list[list[Any]]:
        settings = replace(run.pipeline_settings(world), **place)
        (found,) = training_batches(run.prepared, settings, start_step=step, stop_step=step + 1)
        assert isinstance(found, StepBatches)
        return read(found.micro_batches)

    run = run_to_measure(config)
    profiled = contender("packed", run, world)  # as `benchmarks/gpu_day/stepping.py` takes them
    assert read(micro_batches_of(profiled, 2)) == trained(run, 2)
    shape = replace(run.shape, items_per_step=4 * run.shape.items_per_step)
    virtual = VirtualRanks(run, world)
    shares = [read(virtual.share(4, 3, rank)) for rank in range(4)]
    assert shares == [trained(run, 3, shape=shape, ranks=4, rank=rank) for rank in range(4)]


def with_form(config: RunConfig, scheme: Scheme) -> RunConfig:
    run = run_to_measure(config)
    return with_steps(run.config, scheme.batching, scheme.layout, scheme.policy, each=BATCH, per_step=BATCH)


def test_a_replay_is_measured_and_leaves_the_process_as_it_was(config: RunConfig, world: World) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = replayed(config, world, (2,))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert found.update_seconds > 0
    for scheme in REPLAYED:
        alone, two = found.of(scheme)
        assert two.sequences_per_second > alone.sequences_per_second > 0


def test_several_ranks_and_micro_batches_that_do_not_fit_are_refused(
    config: RunConfig, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="one device, but 2 processes"):
        replayed(config, dataclasses.replace(world, size=2), (1, 4))
    small = SimpleNamespace(total_memory=10**6)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: small)
    with pytest.raises(ConfigError, match=r"--replay: a micro-batch of 3 packs .* lower --batch and --packs"):
        replayed(config, dataclasses.replace(world, device=torch.device("cuda")), (1, 4))


command = partial(evenpack, "study", "imbalance", DS_ACCELERATOR="cpu")


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        ("1,4", "squad_1_1_384 is a list of lengths: give a run file"),
        ("0", "--replay 0: '0' is not a positive integer"),
    ],
)
def test_a_replay_that_cannot_be_is_refused(devices: str, words: str) -> None:
    code, out, err = command("squad_1_1_384", "--replay", devices)
    assert (code, out) == (2, "")
    assert words in " ".join(err.split())


@pytest.mark.slow
def test_tables_figure_and_json_have_the_replay(
    config: RunConfig,
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(study_module, "joined_world", lambda: nullcontext(world))
    run_file, figure, saved = tmp_path / "run.yaml", tmp_path / "replay.png", tmp_path / "replay.json"
    run_file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    options = ("--replay", "1,2", "--replay-steps", "3", "--batch", "4", "--devices", "1..4", "--steps", "30")
    code, out, err = command(run_file, *options, "--plot", figure, "--save", saved)
    assert code == 0, err
    assert "6 on 1, 3 on 2 devices" in " ".join(out.split())
    assert figure.stat().st_size > 10_000
    value = json.loads(saved.read_text())["replay"]
    assert {(row["layout"], row["policy"], row["devices"]) for row in value["rows"]} == {
        (scheme.layout, scheme.policy, devices) for scheme in REPLAYED for devices in (1, 2)
    }
    assert value["batch"] == 4
    assert value["measured_on"]["device"] == world.device_name
