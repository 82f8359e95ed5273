"""LAMB under DeepSpeed on 1, 2 and 4 ranks equals that of one process, and its runs resume bit for bit."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch
from forked_ranks import run_ranks
from plain_lamb import PlainLamb, blocks_of
from slow_cases import slow_but
from test_normalisation import (
    CLIPPING,
    Setting,
    make_model,
    micro_batches,
    reference_gradients,
    run_config,
    unpacked_batches,
)
from tiny_training import changed, exact, prepare_run, records, stop_after, train_all

from evenpack.engine.config import RunConfig
from evenpack.engine.engine import TrainingEngine
from evenpack.engine.train import train_in
from evenpack.engine.world.distributed import World
from evenpack.models.common.loss_sums import exact_denominators

STEPS = 10
LARGE_EPSILON = 1e-3
"""Or Adam's division would blow rounding errors of gradients that are zero up to whole updates."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """The difference of one engine from plain LAMB after ten steps."""

    from_one_process: float
    """What all changed, relative, against a process that computes its own gradients from un-packed sequences."""
    from_own_gradients: float
    """The worst tensor's weights, relative, against plain LAMB in FP64 fed with the gradients that the engine had."""
    change: float
    """Of the tensor that changed least, relative to its weights: what the number above must be far below."""
    dtypes: frozenset[torch.dtype]
    """Of parameters and moments."""


def lamb_config(setting: Setting, *, ranks: int) -> RunConfig:
    optimizer = {"kind": "lamb", "beta1": 0.8, "beta2": 0.95, "epsilon": LARGE_EPSILON, "weight_decay": 0.1}
    return changed(
        run_config(setting, ranks=ranks), optimizer=optimizer, schedule={"kind": "polynomial", "final_fraction": 0.0}
    )


def plain(config: RunConfig, model: torch.nn.Module) -> PlainLamb:
    section = config.optimizer
    return PlainLamb.over(
        list(model.parameters()),
        blocks_of(model),
        beta1=section.beta1,
        beta2=section.beta2,
        epsilon=section.epsilon,
        weight_decay=section.weight_decay,
    )


def rate(config: RunConfig, step: int) -> float:
    return config.optimizer.learning_rate * (1.0 - step / config.training.steps)


def compare(world: World, setting: Setting, alone: np.ndarray) -> Report:
    """Trains with the engine; `alone` has all weights of `train_alone`."""
    config = lamb_config(setting, ranks=world.size)
    mine = micro_batches(rank=world.rank, ranks=world.size, accumulation=setting.accumulation)
    engine = TrainingEngine(make_model(), config, world, denominators=partial(exact_denominators, config.model.losses))
    parameters = list(engine.model.parameters())
    start = [parameter.detach().double().clone() for parameter in parameters]
    follower = plain(config, engine.model)
    update = engine.deepspeed.step

    def follow_and_update() -> None:
        follower.step([parameter.grad for parameter in parameters], learning_rate=rate(config, steps_done))
        update()

    engine.deepspeed.step = follow_and_update
    for steps_done in range(STEPS):
        engine.train_step(steps_done, mine)
    states = [tensor for state in engine.deepspeed.optimizer.state.values() for tensor in state.values()]
    engine.deepspeed.destroy()
    return Report(
        from_one_process=relative(flat(parameters) - flat(start), torch.from_numpy(alone) - flat(start)),
        from_own_gradients=max(
            relative(ours, theirs) for ours, theirs in zip(parameters, follower.weights, strict=True)
        ),
        change=min(map(relative, parameters, start)),
        dtypes=frozenset(tensor.dtype for tensor in [*parameters, *states]),
    )


@cache
def train_alone(clipping: float | None) -> np.ndarray:
    """Returns all weights after ten FP32 steps in this process, with each sequence separately."""
    config = lamb_config(Setting(clipping=clipping), ranks=1)
    targets = micro_batches(rank=0, ranks=1, accumulation=1)[0].step_counts.targets
    model, batches = make_model(), unpacked_batches()
    parameters = list(model.parameters())
    optimizer = plain(config, model)
    for step in range(STEPS):
        reference_gradients(model, batches, precision="fp32", targets=targets)
        if config.training.gradient_clipping is not None:
            torch.nn.utils.clip_grad_norm_(parameters, config.training.gradient_clipping)
        optimizer.step([parameter.grad for parameter in parameters], learning_rate=rate(config, step))
        with torch.no_grad():
            for parameter, weight in zip(parameters, optimizer.weights, strict=True):
                parameter.copy_(weight)
    return flat(optimizer.weights).numpy()


def flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors])


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm()).item()


def measure(world: World, unclipped: np.ndarray, clipped: np.ndarray) -> list[Report]:
    return [
        compare(world, Setting(accumulation=2), unclipped),
        compare(world, Setting(accumulation=4, clipping=CLIPPING), clipped),
        compare(world, Setting(accumulation=2, clipping=CLIPPING, precision="bf16_autocast"), clipped),
    ]


@pytest.mark.parametrize("ranks", slow_but([2], [1, 2, 4]))
def test_ten_steps_of_lamb_are_those_of_one_plain_process(ranks: int):
    for fp32, clipped, bf16 in run_ranks(measure, ranks, train_alone(None), train_alone(CLIPPING)):
        for report in (fp32, clipped):
            assert report.from_one_process < 1e-5, report
        for report in (fp32, clipped, bf16):
            assert report.from_own_gradients < 3e-7, report
            assert report.change > 1e-4, report
        assert {*fp32.dtypes, *clipped.dtypes, *bf16.dtypes} == {torch.float32}
        assert bf16.from_one_process > 1e-3, "bfloat16 must have been computed in"


def stop_and_go_on(world: World, pairs: list[tuple[RunConfig, RunConfig]]) -> None:
    """Trains one run of each pair without a stop; the other stops after two steps and resumes."""
    for straight, stopped in pairs:
        train_all(world, [straight])
        train_in(world, stopped, stop_requested=stop_after(2))
        train_all(world, [stopped])


@pytest.mark.slow
def test_adjusted_runs_resume_as_they_began(tmp_path: Path):
    """Packs hold nearly three sequences: `lamb_betas` is a run of fewer steps, and the other one of smaller steps."""
    documents = [f"{number} {'pack ' * (number % 5)}{number * number}" for number in range(80)]
    plain = prepare_run(tmp_path, {"lines": documents}, packs_per_step=32, packs_per_micro_batch=2)
    pairs = []
    for kind, optimizer, steps in (("lamb_betas", "lamb", 12), ("fewer_accumulations", "adamw", 5)):
        straight, stopped = (
            changed(
                plain,
                run={"output_dir": tmp_path / kind / name},
                model={"dropout": 0.1},
                optimizer={"kind": optimizer},
                training={"packing_adjustment": kind, "steps": steps},
            )
            for name in ("straight", "stopped")
        )
        pairs.append((straight, stopped))
    run_ranks(stop_and_go_on, 2, pairs)
    for straight, stopped in pairs:
        assert exact(stopped) == exact(straight)
    betas, fewer = (records(straight) for straight, _ in pairs)
    assert 3 < len(betas) < 12
    assert len(fewer) == 5
    assert fewer[0]["slots"] < 32 * plain.data.pack_length
