"""LAMB on a CUDA device, where one kernel computes the moments, agrees with the plain one."""

import pytest
import torch
from plain_lamb import PlainLamb
from torch import nn

from evenpack.engine.optimizers.build import build_optimizer
from evenpack.engine.optimizers.config import LambSection
from evenpack.engine.optimizers.lamb import trust_ratios

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
STEPS = 10


@pytest.mark.parametrize("bias_correction", [True, False])
def test_ten_fused_steps_are_those_of_a_plain_reference(bias_correction: bool):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(500, 64), nn.Linear(64, 256), nn.LayerNorm(256)).to(DEVICE)
    section = LambSection(
        kind="lamb", learning_rate=0.01, beta1=0.8, beta2=0.95, weight_decay=0.1, bias_correction=bias_correction
    )
    parameters = list(model.parameters())
    reference = PlainLamb.over(
        parameters, beta1=0.8, beta2=0.95, epsilon=1e-6, weight_decay=0.1, bias_correction=bias_correction
    )
    optimizer = build_optimizer(model, section, DEVICE)
    for _ in range(STEPS):
        gradients = [torch.randn_like(parameter) for parameter in parameters]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        reference.step(gradients, learning_rate=0.01)
    for ours, theirs in zip(parameters, reference.weights, strict=True):
        assert ((ours - theirs).norm() / theirs.norm()).item() < 3e-7
    assert all(optimizer.state[parameter]["step"].device.type == "cuda" for parameter in parameters)


def test_the_norm_of_a_large_fp32_tensor_is_right():
    weight = torch.randn(30_522, 1024, device=DEVICE)
    update = torch.zeros_like(weight)
    update[7] = 1.0
    exact = (weight.double().norm() / update.double().norm()).item()
    assert trust_ratios([weight], [update])[0].item() == pytest.approx(exact, rel=1e-5)
