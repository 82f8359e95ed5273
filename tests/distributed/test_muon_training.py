"""Muon under DeepSpeed on 1, 2 and 4 ranks equals one process of a few lines in FP64."""

from functools import cache, partial

import numpy as np
import pytest
import torch
from forked_ranks import run_ranks
from test_lamb_training import flat, rate, relative
from test_normalisation import Setting, make_model, micro_batches, reference_gradients, run_config, unpacked_batches
from tiny_training import changed

from evenpack.engine.config import RunConfig
from evenpack.engine.engine import TrainingEngine
from evenpack.engine.world.distributed import World
from evenpack.models.common.loss_sums import exact_denominators

STEPS = 10


def muon_config(clipping: float | None, *, ranks: int, accumulation: int = 1) -> RunConfig:
    return changed(
        run_config(Setting(accumulation=accumulation, clipping=clipping), ranks=ranks),
        optimizer={"kind": "muon", "learning_rate": 1e-2, "epsilon": 1e-3, "weight_decay": 0.1},
        schedule={"kind": "polynomial", "final_fraction": 0.0},
    )


@cache
def train_alone(clipping: float | None) -> np.ndarray:
    """Returns all weights after ten steps, with each sequence separately, and each matrix by itself."""
    config = muon_config(clipping, ranks=1)
    targets = micro_batches(rank=0, ranks=1, accumulation=1)[0].step_counts.targets
    model, batches = make_model(), unpacked_batches()
    weights = {name: parameter.detach().double().clone() for name, parameter in model.named_parameters()}
    first = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    second = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for step in range(STEPS):
        reference_gradients(model, batches, precision="fp32", targets=targets)
        if clipping is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clipping)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            change = change_of(name, parameter.grad.double(), first[name], second[name], updates=step + 1)
            decay = 0.1 if parameter.dim() == 2 else 0.0
            weights[name] -= rate(config, step) * (decay * weights[name] + change)
            with torch.no_grad():
                parameter.copy_(weights[name])
    return flat(list(weights.values())).numpy()


def change_of(
    name: str, gradient: torch.Tensor, first: torch.Tensor, second: torch.Tensor, *, updates: int
) -> torch.Tensor:
    """Returns what the learning rate multiplies, and updates the moments."""
    if name.startswith("blocks.") and gradient.dim() == 2:
        first.mul_(0.95).add_(gradient, alpha=0.05)
        parts = (0.05 * gradient + 0.95 * first).chunk(3 if "query_key_value" in name else 1)
        return torch.cat([0.2 * max(part.shape) ** 0.5 * orthogonal(part) for part in parts])
    first.mul_(0.9).add_(gradient, alpha=0.1)
    second.mul_(0.95).add_(gradient**2, alpha=0.05)
    denominator = (second / (1.0 - 0.95**updates)).sqrt() + 1e-3
    return first / (1.0 - 0.9**updates) / denominator


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Applies the polynomial to the singular values, in place of products of matrices."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / values.norm()
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return left * values @ right


def measure(world: World, expected: dict[float | None, np.ndarray]) -> list[tuple[float, float]]:
    """Returns how far the engine's weights are from those, and how far they have come, both relative."""
    found = []
    for clipping, alone in expected.items():
        config = muon_config(clipping, ranks=world.size, accumulation=2)
        engine = TrainingEngine(
            make_model(), config, world, denominators=partial(exact_denominators, config.model.losses)
        )
        parameters = list(engine.model.parameters())
        start = flat(parameters)
        for step in range(STEPS):
            engine.train_step(step, micro_batches(rank=world.rank, ranks=world.size, accumulation=2))
        engine.deepspeed.destroy()
        found.append((relative(flat(parameters), torch.from_numpy(alone)), relative(flat(parameters), start)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ten_steps_of_muon_are_those_of_one_plain_process(ranks: int) -> None:
    for reports in run_ranks(measure, ranks, {clipping: train_alone(clipping) for clipping in (None, 0.05)}):
        for distance, change in reports:
            assert distance < 1e-6
            assert change > 1e-2
