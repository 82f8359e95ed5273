"""However a step is split, its gradient is that of one large un-packed batch (invariants 3 and 6)."""

from copy import copy
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from batches import build_batch, random_sequences
from forked_ranks import run_ranks
from run_files import run_config as checked_run
from run_files import run_values
from slow_cases import slow_but

from evenpack.batch import PackedBatch
from evenpack.engine.config import RunConfig
from evenpack.engine.engine import TrainingEngine
from evenpack.engine.sharding import SHARDINGS
from evenpack.engine.world.distributed import World
from evenpack.models.common.loss_sums import exact_denominators
from evenpack.models.gpt2.model import Gpt2

PACKS = 16
PACK_LENGTH = 24
VOCABULARY = 61
CLIPPING = 0.05
"""Far below the gradient norm here, which is about 1."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The division and computation of a step."""

    stage: int = 0
    precision: str = "fp32"
    accumulation: int = 1
    clipping: float | None = None
    overlap: bool = False
    """ZeRO 1 exchanges gradients while the last backward pass goes on."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """The difference of one engine from the reference."""

    setting: Setting
    tokens: tuple[int, ...]
    """Real tokens of each rank."""
    gradient: float
    """Largest relative error (L2) of a parameter's gradient."""
    gradient_norm: float
    """Relative error."""
    update: float
    """Relative error of what the updates changed, all parameters together."""


Reference = tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]
"""The first gradient of each parameter; its norm before clipping; the last weights, all parameters together."""


def make_packs() -> list[list[list[int]]]:
    """Returns packs with 2 tokens up to full, so that shares of ranks and micro-batches are very unequal."""
    fills = [2 + (PACK_LENGTH - 2) * index // (PACKS - 1) for index in range(PACKS)]
    lengths = [[fill] if fill < 8 else [fill // 3, fill - fill // 3] for fill in fills]
    return [random_sequences(parts, vocabulary_size=VOCABULARY, seed=index) for index, parts in enumerate(lengths)]


def make_model() -> Gpt2:
    config = run_config(Setting(), ranks=1).model
    model = Gpt2(config, vocabulary_size=VOCABULARY, max_positions=PACK_LENGTH, attention_backend="sdpa", seed=3)
    with torch.no_grad():  # away from the initial biases of zero, and large enough that clipping clips
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=0.1)
    return model


def run_config(setting: Setting, *, ranks: int) -> RunConfig:
    extra = {"zero_optimization": {"overlap_comm": True}} if setting.overlap else {}
    return checked_run(
        run_values(
            "gpt2",
            Path("unused"),
            data={"recipe": {"kind": "documents", "max_sequence_length": PACK_LENGTH}, "pack_length": PACK_LENGTH},
            training={
                "packs_per_step": PACKS,
                "packs_per_micro_batch": PACKS // (ranks * setting.accumulation),
                "steps": 10,
                "precision": setting.precision,
                "gradient_clipping": setting.clipping,
            },
            # A large epsilon, or Adam would blow rounding errors of tiny gradients up to whole updates.
            optimizer={"learning_rate": 1e-2, "epsilon": 1e-3},
            schedule={"kind": "linear"},
            deepspeed={"zero_stage": setting.stage, "extra": extra},
        )
    )


def micro_batches(*, rank: int, ranks: int, accumulation: int) -> list[PackedBatch]:
    """Returns a rank's share, with the counts of the whole step."""
    packs = make_packs()
    counts = build_batch(packs, "packed", max_sequence_length=PACK_LENGTH)[0].step_counts
    size = PACKS // (ranks * accumulation)
    first = rank * accumulation * size
    return [
        replace(part(packs[first + index * size : first + (index + 1) * size]), step_counts=counts)
        for index in range(accumulation)
    ]


def part(packs: list[list[list[int]]]) -> PackedBatch:
    return build_batch(packs, "packed", max_sequence_length=PACK_LENGTH, pack_length=PACK_LENGTH)[0]


def reference_gradients(model: Gpt2, batches: list[PackedBatch], *, precision: str, targets: int) -> None:
    """Computes the gradient of the mean loss over all targets in this process, and leaves it in `model`."""
    model.zero_grad()
    for batch in batches:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16_autocast"):
            loss = model(batch)["next_token"].loss_sum
        (loss / targets).backward()


def unpacked_batches() -> list[PackedBatch]:
    """Returns every sequence of the step as a batch of its own."""
    return [
        build_batch([[sequence]], "unpadded", max_sequence_length=PACK_LENGTH)[0]
        for pack in make_packs()
        for sequence in pack
    ]


def compare(world: World, config: RunConfig, setting: Setting, reference: Reference) -> Report:
    """Compares one engine with torch alone: the gradient, its norm, and updates."""
    mine = micro_batches(rank=world.rank, ranks=world.size, accumulation=setting.accumulation)
    gradients, norm, updated = (list(map(torch.from_numpy, arrays)) for arrays in reference)
    start = make_model()
    engine = TrainingEngine(make_model(), config, world, denominators=partial(exact_denominators, config.model.losses))
    seen = spy_on_gradients(engine)
    result = engine.train_step(0, mine)
    for step in range(1, updates(config)):
        engine.train_step(step, mine)
    report = Report(
        setting=setting,
        tokens=tuple(world.all_gather(sum(batch.local_counts.tokens for batch in mine))),
        gradient=max(relative(ours, theirs) for ours, theirs in zip(seen, gradients, strict=True)),
        gradient_norm=relative(result.gradient_norm, norm[0]),
        update=relative(whole(engine) - flat(start), updated[0] - flat(start)),
    )
    engine.deepspeed.destroy()
    return report


def spy_on_gradients(engine: TrainingEngine) -> list[torch.Tensor]:
    """Fills a list with each parameter's global gradient of the first update, before it is clipped."""
    from deepspeed.utils import safe_get_full_grad

    seen: list[torch.Tensor] = []
    update = engine.sharding.update

    def look_and_update(deepspeed: Any, limit: float | None, **named: Any) -> torch.Tensor | float:
        if not seen:
            seen.extend(safe_get_full_grad(parameter).clone() for parameter in engine.model.parameters())
        return update(deepspeed, limit, **named)

    engine.sharding = copy(engine.sharding)
    engine.sharding.update = look_and_update  # type: ignore[method-assign]
    return seen


def updates(config: RunConfig) -> int:
    """Returns how many updates are compared: in bfloat16 a difference in the last bit may change the rounding."""
    return 3 if config.training.precision == "fp32" else 1


def reference_of(setting: Setting, *, ranks: int) -> Reference:
    split = (1, 1) if setting.precision == "fp32" else (ranks, setting.accumulation)
    return train_reference(setting.precision, setting.clipping, *split)


@cache
def train_reference(precision: str, clipping: float | None, ranks: int, accumulation: int) -> Reference:
    """Updates the model with torch's AdamW and clipping.

    In FP32 every sequence of the step is computed by itself. In bfloat16 other shapes would round otherwise, so only
    the split may differ: the micro-batches of all ranks follow one another.
    """
    config = run_config(Setting(precision=precision, clipping=clipping), ranks=1)
    batches = unpacked_batches()
    targets = micro_batches(rank=0, ranks=1, accumulation=1)[0].step_counts.targets
    if precision == "bf16_autocast":
        batches = [
            batch for rank in range(ranks) for batch in micro_batches(rank=rank, ranks=ranks, accumulation=accumulation)
        ]
    model, section = make_model(), config.optimizer
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices}, {"params": others, "weight_decay": 0.0}],
        betas=(section.beta1, section.beta2),
        eps=section.epsilon,
        weight_decay=section.weight_decay,
    )
    first: list[torch.Tensor] = []
    for update in range(1, updates(config) + 1):
        reference_gradients(model, batches, precision=precision, targets=targets)
        first = first or [parameter.grad.clone() for parameter in model.parameters()]
        if clipping is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clipping)
        for group in optimizer.param_groups:
            group["lr"] = section.learning_rate * (1.0 - 0.9 * update / config.training.steps)
        optimizer.step()
    norm, last = torch.nn.utils.get_total_norm(first), flat(model)
    return [gradient.numpy() for gradient in first], [norm.numpy()], [last.numpy()]


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm()).item()


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def whole(engine: TrainingEngine) -> torch.Tensor:
    """Returns the weights, gathered where the ranks have parts of them."""
    from deepspeed.runtime.zero import GatheredParameters

    with GatheredParameters(list(engine.model.parameters()), enabled=engine.sharding.gathers_parameters):
        return flat(engine.model)


def settings() -> list[Setting]:
    """Returns all ZeRO stages and accumulations, and bfloat16, clipping and overlap where they matter."""
    found = []
    for stage in SHARDINGS:
        usual = Setting(stage=stage, accumulation=2)
        found += [replace(usual, precision="bf16_autocast"), replace(usual, clipping=CLIPPING)]
        if stage < 2:
            found += [replace(usual, accumulation=accumulation) for accumulation in (1, 4)]
        if stage == 1:
            found += [replace(usual, overlap=True, accumulation=4)]
    return found


def naive_mean(world: World) -> float:
    """Returns the error of a mean over micro-batches and ranks of their own mean losses."""
    mine = micro_batches(rank=world.rank, ranks=world.size, accumulation=2)
    reference, naive = make_model(), make_model()
    reference_gradients(reference, unpacked_batches(), precision="fp32", targets=mine[0].step_counts.targets)
    for batch in mine:
        (naive(batch)["next_token"].loss_sum / batch.local_counts.targets / (2 * world.size)).backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in naive.parameters()])
    total = world.all_sum(gradient.double())
    return relative(total, torch.cat([parameter.grad.flatten() for parameter in reference.parameters()]).double())


def seeds_of_two_steps(world: World) -> list[int]:
    """Returns the random state at the start of each micro-batch of steps 0 and 1."""
    config = run_config(Setting(accumulation=2), ranks=world.size)
    engine = TrainingEngine(make_model(), config, world, denominators=partial(exact_denominators, config.model.losses))
    seen: list[int] = []
    engine.model.register_forward_pre_hook(lambda *_: seen.append(torch.initial_seed()))
    for step in (0, 1):
        engine.train_step(step, micro_batches(rank=world.rank, ranks=world.size, accumulation=2))
    with pytest.raises(ValueError, match="a step has 2 micro-batches on each rank, got 1"):
        engine.train_step(2, micro_batches(rank=world.rank, ranks=world.size, accumulation=1))
    engine.deepspeed.destroy()
    return seen


def measure(world: World, references: list[Reference]) -> tuple[list[Report], float, list[int]]:
    """Runs all checks of one number of ranks in one process group."""
    reports = [
        compare(world, run_config(setting, ranks=world.size), setting, reference)
        for setting, reference in zip(settings(), references, strict=True)
    ]
    return reports, naive_mean(world), seeds_of_two_steps(world)


@pytest.mark.parametrize("ranks", slow_but([2], [1, 2, 4]))
def test_any_split_gives_the_gradient_and_the_updates_of_one_unpacked_batch(ranks: int):
    measured = run_ranks(measure, ranks, [reference_of(setting, ranks=ranks) for setting in settings()])
    for reports, naive_error, _ in measured:
        assert len(reports) == len(settings())
        assert naive_error > 0.05, "a mean of means would pass as well"
        for report in reports:
            assert ranks == 1 or max(report.tokens) > 1.5 * min(report.tokens), "shares must be unequal"
            assert report.gradient < 1e-5, report
            assert report.gradient_norm < 1e-5, report
            assert report.update < 1e-5, report
    seeds = [seed for _, _, seeds_of_rank in measured for seed in seeds_of_rank]
    assert len(set(seeds)) == 2 * 2 * ranks, "each micro-batch of each rank and step has dropout of its own"
