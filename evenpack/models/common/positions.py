"""Encodes the position of a token: a learned table, ALiBi's bias in attention, or rotated queries and keys.

All restart with each segment: table and rotation use `PackedBatch.position_ids`, and ALiBi sees only distances
between positions of one segment. ALiBi and rotation have no parameters that depend on the longest sequence.

Shapes: T = slots, C = hidden size, D = head_dim.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from evenpack.models.common.section import RotaryScaling


class LearnedPositions(nn.Module):
    """One trained vector for each position in a segment."""

    def __init__(self, rows: int, hidden_size: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, hidden_size)

    def forward(self, position_ids: Int[Tensor, " T"], rows_needed: int) -> Float[Tensor, " T C"]:
        """Returns the vectors for `position_ids`, which are below `rows_needed`.

        Raises: ValueError if positions may lie beyond the table. The bound is checked instead of the ids: that
        does not wait for the device, where an id outside the table would end the process without a message.
        """
        rows = self.table.num_embeddings
        if rows_needed > rows:
            raise ValueError(
                f"sequences of up to {rows_needed} tokens need as many learned positions, the model has "
                f"{rows}; raise model.max_positions or lower data.recipe.max_sequence_length"
            )
        return self.table(position_ids)


def alibi_slopes(heads: int, device: torch.device) -> Float[Tensor, " heads"]:
    """Returns the FP32 slope of each head, which adds -slope * distance to its attention scores.

    For n heads, a power of two, the slopes are 2^(-8/n), 2^(-16/n), ..., 2^-8. For other n they are the slopes of the
    power of two below n, followed by the odd-numbered ones of twice that power until there are n.

    They are computed where they are used and never stored in the model: a stored tensor would lose bits when the
    model is cast to bfloat16 and its values when it is materialised from the meta device.

    Source: Press, Smith, Lewis 2022 (Train Short, Test Long), section 3, and the rule in their published code.
    """
    power = 1 << (heads.bit_length() - 1)
    exponents = torch.cat([_slope_exponents(power, device), _slope_exponents(2 * power, device)[::2][: heads - power]])
    return exponents.exp2().float()


def _slope_exponents(heads: int, device: torch.device) -> Float[Tensor, " heads"]:
    """Returns base-2 logarithms of the slopes for a power of two, in FP64 so that FP32 slopes round correctly."""
    return torch.arange(1, heads + 1, dtype=torch.float64, device=device) * (-8 / heads)


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """Rotary positions: pairs of channels (i, i + D/2) of each head, rotated by angles proportional to the position.

    Source: Su et al. 2021, RoFormer (arXiv:2104.09864), section 3.2; channels are paired as in transformers' Llama.
    """

    cos: Float[Tensor, " T 1 D"]
    sin: Float[Tensor, " T 1 D"]
    """Sines in FP32; the first half is negated, for channels that are combined with those after them."""

    @staticmethod
    def at(
        position_ids: Int[Tensor, " T"], *, head_dim: int, base: float, scaling: RotaryScaling | None = None
    ) -> "Rotation":
        """Returns the rotation by p * base^(-2i / D) of pair i at position p, computed in FP32 as transformers does.

        With `scaling` the frequencies base^(-2i / D) are scaled before. It is computed where it is used and never
        stored in the model: see `alibi_slopes`.
        """
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=position_ids.device) / head_dim
        frequencies = 1.0 / base**exponents
        if scaling is not None:
            frequencies = _scaled(frequencies, scaling)
        angles = position_ids[:, None].float() * frequencies
        cos, sin = angles.cos(), angles.sin()
        return Rotation(cos=torch.cat([cos, cos], dim=1)[:, None], sin=torch.cat([-sin, sin], dim=1)[:, None])

    def turn(self, heads: Float[Tensor, " T H D"]) -> Float[Tensor, " T H D"]:
        """Returns rotated queries or keys, computed in FP32, in their own dtype."""
        swapped = heads.roll(heads.shape[2] // 2, dims=2)
        return (heads * self.cos + swapped * self.sin).to(heads.dtype)


def _scaled(frequencies: Float[Tensor, " pairs"], scaling: RotaryScaling) -> Float[Tensor, " pairs"]:
    """Returns the frequencies of pairs of channels after the scaling, in the order of operations of transformers."""
    turns = scaling.original_positions / (2 * math.pi / frequencies)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies
