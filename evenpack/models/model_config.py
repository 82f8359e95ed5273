"""The `model:` section of a run file."""

from typing import Literal

from pydantic import Field, model_validator

from evenpack.config import Section

GPT2_PRESETS: dict[str, dict[str, int]] = {
    "tiny": {"layers": 2, "hidden_size": 128, "heads": 2},
    "mini": {"layers": 4, "hidden_size": 256, "heads": 4},
    "small": {"layers": 12, "hidden_size": 768, "heads": 12},
    "medium": {"layers": 24, "hidden_size": 1024, "heads": 16},
    "large": {"layers": 36, "hidden_size": 1280, "heads": 20},
    "xl": {"layers": 48, "hidden_size": 1600, "heads": 25},
}
"""Radford et al. 2019, table 2; tiny and mini are ours, for CPUs."""


class Gpt2Config(Section):
    """GPT-2: a preset, each of whose numbers may be overridden."""

    kind: Literal["gpt2"]
    preset: Literal["tiny", "mini", "small", "medium", "large", "xl"] = "small"
    positions: Literal["learned", "alibi"] = "learned"
    max_positions: int | None = Field(default=None, ge=1)
    """Rows of the learned position table; null: the recipe's max_sequence_length."""
    layers: int | None = Field(default=None, ge=1)
    hidden_size: int | None = Field(default=None, ge=8)
    heads: int | None = Field(default=None, ge=1)
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """After embeddings, attention probabilities, and each residual branch."""
    activation_checkpointing: bool = False
    """Recompute each block in the backward pass: less memory, about a third more work."""

    @model_validator(mode="after")
    def _check(self) -> "Gpt2Config":
        if self.shape["hidden_size"] % self.shape["heads"]:
            raise ValueError(
                f"hidden_size ({self.shape['hidden_size']}) must be a multiple of heads ({self.shape['heads']})"
            )
        return self

    @property
    def shape(self) -> dict[str, int]:
        """layers, hidden_size and heads with the overrides applied."""
        preset = GPT2_PRESETS[self.preset]
        return {name: getattr(self, name) or preset[name] for name in preset}
