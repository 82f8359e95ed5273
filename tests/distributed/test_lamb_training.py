"""LAMB under DeepSpeed on 1, 2 and 4 ranks equals that of one process, and its runs resume bit for bit."""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
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
from tiny_training import changed, logged, prepare_run, records, refusal, stop_after, train_all

from evenpack.engine.config import RunConfig
from evenpack.engine.engine import TrainingEngine
from evenpack.engine.resolving.data_facts import AverageItem, DataFacts
from evenpack.engine.resolving.settle import settle
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


DOCUMENTS = [f"{number} {'pack ' * (number % 5)}{number * number}" for number in range(80)]
EXACT = ("step", "loss", "learning_rate", "gradient_norm", "targets", "order_hash")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """Returns a run of 32 packs per step; its packs hold nearly three sequences."""
    prepared = prepare_run(
        tmp_path_factory.mktemp("lamb"), {"lines": DOCUMENTS}, packs_per_step=32, packs_per_micro_batch=2, steps=12
    )
    return changed(
        prepared,
        optimizer={"kind": "lamb", "beta2": 0.999},
        schedule={"kind": "polynomial", "warmup_steps": 4, "final_fraction": 0.0},
    )


def exact(config: RunConfig) -> list[list[object]]:
    return [[record[name] for name in EXACT] for record in records(config)]


def saved_run_file(config: RunConfig, step: int) -> dict[str, dict[str, object]]:
    """Returns the resolved run file that a checkpoint holds."""
    manifest = config.run.output_dir / "checkpoints" / f"step_{step:06d}" / "manifest.json"
    state: dict[str, dict[str, dict[str, object]]] = json.loads(manifest.read_text())["state"]
    return state["config"]


@dataclass(frozen=True, kw_only=True)
class Told:
    """The messages and refusals on one rank."""

    log: list[str]
    """Of the first run."""
    refusals: list[str]
    """Of a run that must not go on with another step, and with another optimizer."""


def all_runs(world: World, betas: tuple[RunConfig, RunConfig], fewer: tuple[RunConfig, RunConfig]) -> Told:
    """Trains, for each adjustment, a whole run, and one that stops after two steps and resumes."""
    logging.getLogger("evenpack").setLevel(logging.INFO)
    with logged(level=logging.INFO) as said:
        train_all(world, [betas[0]])
    train_in(world, betas[1], stop_requested=stop_after(2))
    train_all(world, [betas[1], fewer[0]])
    train_in(world, fewer[1], stop_requested=stop_after(2))
    another_step = changed(fewer[1], training={"packs_per_step": 64})
    another_optimizer = changed(fewer[1], optimizer={"kind": "lamb"})
    refusals = [refusal(world, another_step), refusal(world, another_optimizer)]
    train_all(world, [changed(fewer[1], training={"packs_per_micro_batch": 1})])
    return Told(log=said, refusals=refusals)


@pytest.mark.slow
def test_adjusted_runs_say_what_they_do_and_resume_as_they_began(config: RunConfig, tmp_path: Path):
    adamw = config.optimizer.model_dump(exclude={"bias_correction"}) | {"kind": "adamw"}
    with_adamw = RunConfig.model_validate(config.model_dump() | {"optimizer": adamw})
    betas, fewer = (
        tuple(
            changed(
                base,
                run={"output_dir": tmp_path / kind / name},
                model={"dropout": dropout},
                training={"packing_adjustment": kind, "steps": steps},
            )
            for name in ("straight", "stopped")
        )
        for base, kind, steps, dropout in ((config, "lamb_betas", 12, 0.1), (with_adamw, "fewer_accumulations", 5, 0.0))
    )
    for told in run_ranks(all_runs, 2, betas, fewer):
        (line,) = [text for text in told.log if text.startswith("packing adjustment lamb_betas for ")]
        assert "has done 2 steps of 12, this run's training.packs_per_step is 24" in told.refusals[0]
        assert "another network or optimizer" in told.refusals[1]
        assert "optimizer.kind: adamw -> lamb" in told.refusals[1]
    check_packed_betas(*betas, line)
    check_fewer_accumulations(*fewer)


def settled_again(config: RunConfig, factor: float) -> RunConfig:
    item = AverageItem(sequences=Fraction(factor), tokens=Fraction(1), row_slots=config.data.pack_length)
    return settle(config, DataFacts(item=item, items_per_epoch=None, vocabulary_size=100)).config


def check_packed_betas(straight: RunConfig, stopped: RunConfig, line: str) -> None:
    factor = float(line.split()[4])
    assert 1.5 < factor < 4.0
    steps = round(12 / factor)
    assert f"training.steps 12 -> {steps} " in line
    assert exact(stopped) == exact(straight)
    assert len(exact(straight)) == steps
    saved = saved_run_file(straight, steps)
    assert saved["training"]["steps"] == steps
    assert saved["schedule"]["warmup_steps"] == round(4 / factor)
    assert saved["optimizer"]["beta1"] == pytest.approx(0.9**factor, rel=1e-3)
    assert saved["optimizer"]["beta2"] == pytest.approx(0.999**factor, rel=1e-3)
    assert saved["optimizer"]["learning_rate"] == straight.optimizer.learning_rate
    again = RunConfig.model_validate(saved)
    assert settled_again(again, factor) == again, "nothing is adjusted twice"
    assert exact(straight)[-1][2] == pytest.approx(straight.optimizer.learning_rate / steps), "falls over fewer steps"


def check_fewer_accumulations(straight: RunConfig, stopped: RunConfig) -> None:
    packs = saved_run_file(straight, 5)["training"]["packs_per_step"]
    assert isinstance(packs, int)
    assert 8 <= packs < 32
    assert saved_run_file(stopped, 2)["training"]["packs_per_step"] == packs
    whole, halves = exact(straight), exact(stopped)
    assert [record[4:] for record in halves] == [record[4:] for record in whole], "the same order"
    losses = [record[1] for record in whole]
    assert [record[1] for record in halves] == pytest.approx(losses, rel=1e-5), "in smaller micro-batches"
    again = RunConfig.model_validate(saved_run_file(straight, 5))
    assert settled_again(again, 2.0) == again, "nothing is adjusted twice"
    slots = [record["slots"] for record in records(straight)]
    assert slots == [packs * straight.data.pack_length] * 5
