"""LAMB agrees with a plain reference, and its betas with PackedBERT's theorem."""

import copy
import math
from typing import Any

import pytest
import torch
from plain_lamb import PlainLamb
from torch import Tensor, nn

from evenpack.engine.optimizers.lamb import Lamb, trust_ratios

LEARNING_RATE = 0.02
STEPS = 10


def make_parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    """Returns two matrices of very different scale, one of zeros, a batch of matrices, two vectors."""
    generator = torch.Generator().manual_seed(0)
    shapes_and_scales = [((7, 5), 1.0), ((3, 9), 1e-3), ((4, 4), 0.0), ((2, 3, 4), 0.1), ((6,), 1.0), ((5,), 0.0)]
    return [
        nn.Parameter((scale * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype))
        for shape, scale in shapes_and_scales
    ]


def make_gradients(parameters: list[nn.Parameter], step: int) -> list[Tensor | None]:
    """Returns gradients of scales 1e-4 to 1; the second is missing at every third step, the fourth zero at first."""
    generator = torch.Generator().manual_seed(100 + step)
    gradients: list[Tensor | None] = [
        10.0**-index * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)
        for index, parameter in enumerate(parameters)
    ]
    if step % 3 == 1:
        gradients[1] = None
    if step == 0:
        gradients[3] = torch.zeros_like(parameters[3])
    return gradients


def groups_of(parameters: list[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    matrices, vectors = ([one for one in parameters if (one.dim() >= 2) is wanted] for wanted in (True, False))
    return [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0, "trust_ratio": False},
    ]


def take_steps(optimizer: Lamb, parameters: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        for parameter, gradient in zip(parameters, make_gradients(parameters, step), strict=True):
            parameter.grad = gradient
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE / (1 + step)
        optimizer.step()


def largest_error(ours: list[nn.Parameter], theirs: list[Tensor]) -> float:
    """Returns the largest relative error of a tensor."""
    return max(((mine - other).norm() / other.norm()).item() for mine, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 3e-7)])
def test_ten_steps_are_those_of_a_plain_reference(
    fused: bool, bias_correction: bool, weight_decay: float, dtype: torch.dtype, tolerance: float
):
    settings = {"beta1": 0.8, "beta2": 0.95, "epsilon": 1e-6, "bias_correction": bias_correction}
    parameters = make_parameters(dtype)
    reference = PlainLamb.over(parameters, weight_decay=weight_decay, **settings)
    groups, betas = groups_of(parameters, weight_decay), (0.8, 0.95)
    optimizer = Lamb(groups, lr=1.0, betas=betas, eps=1e-6, bias_correction=bias_correction, fused=fused)
    seen: list[float] = []
    for step in range(STEPS):
        reference.step(make_gradients(parameters, step), learning_rate=LEARNING_RATE / (1 + step))
        seen += reference.trust_ratios
    take_steps(optimizer, parameters, range(STEPS))
    assert largest_error(parameters, reference.weights) < tolerance
    assert min(seen) < 0.01, "ratios must be far from 1, and unbounded on both sides"
    assert seen.count(1.0) >= 1, "zeros must have been met"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_multi_tensor_kernels_can_load_four_numbers_at_once_beside_a_ratio(dtype: torch.dtype):
    ratios = trust_ratios(3 * [torch.ones(2, 3, dtype=dtype)], 3 * [torch.ones(2, 3, dtype=dtype)])
    assert [ratio.storage_offset() % 4 for ratio in ratios] == [0, 0, 0]


@pytest.mark.parametrize("fused", [False, True])
def test_blocks_of_a_matrix_are_updated_like_matrices_of_their_own(fused: bool):
    generator = torch.Generator().manual_seed(2)
    parts = {4: 1.0, 2: 1e-2, 3: 0.0}
    apart = [nn.Parameter(scale * torch.randn(rows, 5, generator=generator)) for rows, scale in parts.items()]
    merged, whole = (nn.Parameter(torch.cat([block.detach() for block in apart])) for _ in range(2))
    optimizers = [
        Lamb(apart, lr=LEARNING_RATE, fused=fused),
        Lamb([{"params": [merged], "parts": tuple(parts)}], lr=LEARNING_RATE, fused=fused),
        Lamb([whole], lr=LEARNING_RATE, fused=fused),
    ]
    for _ in range(STEPS):
        gradients = [
            scale * torch.randn(rows, 5, generator=generator)
            for rows, scale in zip(parts, (1e-3, 1.0, 0.1), strict=True)
        ]
        merged.grad, whole.grad = torch.cat(gradients), torch.cat(gradients)
        for parameter, gradient in zip(apart, gradients, strict=True):
            parameter.grad = gradient
        for optimizer in optimizers:
            optimizer.step()
    together = torch.cat([block.detach() for block in apart])
    assert largest_error([merged], [together]) < 3e-7
    assert largest_error([whole], [together]) > 1e-3, "one ratio for all must differ"


def test_a_matrix_without_such_blocks_is_refused():
    with pytest.raises(ValueError, match=r"shape \(4, 3\) has no blocks of \(2, 1\) rows"):
        Lamb([{"params": [nn.Parameter(torch.zeros(4, 3))], "parts": (2, 1)}], lr=0.1)


def test_a_gradient_that_is_not_finite_is_not_hidden():
    parameter = nn.Parameter(torch.ones(2, 2))
    parameter.grad = torch.tensor([[1.0, math.nan], [1.0, 1.0]])
    Lamb([parameter], lr=0.1).step()
    assert not parameter.isfinite().all()


@pytest.mark.parametrize("fused", [False, True])
def test_a_state_that_was_saved_resumes_bit_for_bit(fused: bool):
    straight = make_parameters(torch.float32)
    stopped = make_parameters(torch.float32)
    take_steps(Lamb(groups_of(straight, 0.1), lr=1.0, fused=fused), straight, range(STEPS))
    first = Lamb(groups_of(stopped, 0.1), lr=1.0, fused=fused)
    take_steps(first, stopped, range(4))
    second = Lamb(groups_of(stopped, 0.1), lr=1.0, fused=fused)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    take_steps(second, stopped, range(4, STEPS))
    assert all(torch.equal(one, other) for one, other in zip(straight, stopped, strict=True))


def test_the_state_is_fp32_and_counts_each_parameters_own_updates():
    parameters = make_parameters(torch.float32)
    optimizer = Lamb(groups_of(parameters, 0.1), lr=1.0)
    take_steps(optimizer, parameters, range(STEPS))
    states = [optimizer.state[parameter] for parameter in parameters]
    assert {tensor.dtype for state in states for tensor in state.values()} == {torch.float32}
    assert [state["step"].item() for state in states] == [10, 7, 10, 10, 10, 10]


def test_parameters_that_are_no_masters_are_refused():
    with pytest.raises(ValueError, match=r"bfloat16 with shape \(2, 3\): keep the parameters FP32"):
        Lamb([nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))], lr=0.1)


@pytest.mark.parametrize("wrong", [{"lr": -1.0}, {"eps": 0.0}, {"weight_decay": -0.1}, {"betas": (1.0, 0.9)}])
def test_numbers_out_of_range_are_refused(wrong: dict[str, Any]):
    with pytest.raises(ValueError, match="expected lr and weight_decay of at least 0"):
        Lamb([nn.Parameter(torch.zeros(2, 3))], **({"lr": 0.1} | wrong))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("factor", [1, 2, 3, 7])
def test_packed_betas_give_the_moments_of_as_many_single_updates(factor: int, fused: bool):
    """Theorem D.1 of PackedBERT: for p equal gradients beta**p is exact, from any moments to begin with."""
    singles = moments_after(factor, betas=(0.81, 0.9243), fused=fused)
    packed = moments_after(1, betas=(0.81**factor, 0.9243**factor), fused=fused)
    unchanged = moments_after(1, betas=(0.81, 0.9243), fused=fused)
    torch.testing.assert_close(packed, singles, rtol=1e-12, atol=0.0)
    for one, other in zip(unchanged, singles, strict=True):
        assert factor == 1 or (one / other - 1.0).abs().max() > 0.01, "any betas would do"


def moments_after(updates: int, *, betas: tuple[float, float], fused: bool) -> Tensor:
    """Returns both FP64 moments after different gradients at fixed betas, then `updates` of one gradient at `betas`."""
    parameter = nn.Parameter(torch.ones(4, 3, dtype=torch.float64))
    optimizer = Lamb([parameter], lr=0.01, betas=(0.9, 0.99), fused=fused)
    generator = torch.Generator().manual_seed(5)
    for number in range(3 + updates):
        if number == 3:
            optimizer.param_groups[0]["betas"] = betas
        if number <= 3:
            parameter.grad = torch.rand(4, 3, dtype=torch.float64, generator=generator)
        optimizer.step()
    return torch.stack([optimizer.state[parameter][name] for name in ("exp_avg", "exp_avg_sq")])
