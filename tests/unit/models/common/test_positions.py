import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from evenpack.models.common.positions import LearnedPositions, Rotation, alibi_slopes

CPU = torch.device("cpu")


@pytest.mark.parametrize("heads", range(1, 34))
def test_alibi_slopes_agree_with_blooms(heads):
    two_positions = torch.ones(1, 2, dtype=torch.int64)
    expected = build_alibi_tensor(two_positions, heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(alibi_slopes(heads, CPU), expected, rtol=1e-5, atol=0.0)


def test_alibi_slopes_are_fp32_whatever_the_default():
    torch.set_default_dtype(torch.bfloat16)
    try:
        slopes = alibi_slopes(12, CPU)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(slopes, alibi_slopes(12, CPU), rtol=0.0, atol=0.0)


def test_sequences_longer_than_the_table_are_refused_before_the_device_sees_them():
    with pytest.raises(ValueError, match=r"up to 5 tokens.*the model has 4; raise model.max_positions"):
        LearnedPositions(4, 8)(torch.tensor([0, 1]), 5)


def test_rotary_angles_are_exact_at_far_positions():
    """Positions beyond 256 have no exact value in bfloat16, and angles of thousands need all bits of FP32."""
    positions, head_dim, base = torch.tensor([0, 1, 255, 257, 1023, 4095]), 8, 10_000.0
    rotation = Rotation.at(positions, head_dim=head_dim, base=base)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    angles = positions[:, None].double() / base**exponents
    for found, expected in ((rotation.cos, angles.cos()), (rotation.sin[:, :, head_dim // 2 :], angles.sin())):
        torch.testing.assert_close(found[:, 0, : head_dim // 2].double(), expected, rtol=0.0, atol=5e-4)
    assert rotation.turn(torch.ones(6, 2, head_dim).bfloat16()).dtype == torch.bfloat16
