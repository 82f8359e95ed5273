"""Norms for clipping and trust ratios."""

import pytest
import torch

from evenpack.engine.optimizers.norms import tensor_norms, total_norm


def test_the_norm_of_a_large_fp32_tensor_is_right():
    tensor = torch.randn(30_522, 256, generator=torch.Generator().manual_seed(0))
    bias = torch.randn(30_522, generator=torch.Generator().manual_seed(1))
    exact = torch.cat([tensor.double().flatten(), bias.double()]).norm().item()
    assert abs(torch.nn.utils.get_total_norm([tensor, bias]).item() / exact - 1.0) > 3e-5, "torch's would do as well"
    assert total_norm([tensor, bias]).item() == pytest.approx(exact, rel=2e-7)
    assert total_norm([tensor, bias]).dtype == torch.float32
    assert tensor_norms([tensor, bias]).tolist() == pytest.approx(
        [tensor.double().norm().item(), bias.double().norm().item()], rel=2e-7
    )


def test_norms_of_tensors_of_any_shape():
    tensors = [torch.full((2, 3, 2), 2.0), torch.full((5,), 1.0), torch.full((), -3.0)]
    assert tensor_norms(tensors).tolist() == pytest.approx([48.0**0.5, 5.0**0.5, 3.0])
    assert total_norm(tensors).item() == pytest.approx(62.0**0.5)
    assert total_norm([]).item() == 0.0


def test_what_is_not_finite_stays_so():
    assert not total_norm([torch.ones(2), torch.tensor([float("nan")])]).isfinite()
    assert total_norm([torch.tensor([[float("inf"), 1.0]])]).item() == float("inf")
