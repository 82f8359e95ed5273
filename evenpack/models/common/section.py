"""Defines the keys that the `model:` section of a run file has in every family."""

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from evenpack.config import Section
from evenpack.losses import NEXT_SENTENCE, NEXT_TOKEN, Loss
from evenpack.units import Channels, Heads, Layers, Positions, Share

FEED_FORWARD_RATIO = 4
"""Ratio of the feed-forward width to the hidden size, where a family has no key for it."""


ROTARY_BASE = 10_000.0
"""Base of rotary positions in RoFormer and Llama."""


class TransformerConfig(Section):
    """Base of each family's section: a preset of sizes, each of which may be overridden.

    The properties tell the engine how to handle the model; a family overrides those in which it differs.
    """

    presets: ClassVar[dict[str, dict[str, int]]]

    kind: str
    """The family's name."""
    preset: str
    """Name of a set of sizes."""
    positions: str
    """Encoding of positions."""
    max_positions: Positions | None = Field(default=None, ge=1, le=1 << 24)
    """Rows of the learned position table; null: as many as the data needs (`positions_needed`)."""
    layers: Layers | None = Field(default=None, ge=1, le=1 << 12)
    """Transformer blocks; null: as many as the preset has."""
    hidden_size: Channels | None = Field(default=None, ge=8, le=1 << 17)
    """Width of the residual stream, a multiple of heads; null: the preset's width."""
    heads: Heads | None = Field(default=None, ge=1, le=1 << 12)
    """Attention heads of a layer; null: as many as the preset has."""
    dropout: Share = Field(default=0.0, ge=0.0, lt=1.0)
    """Dropout after embeddings and each residual branch, and of attention probabilities."""
    attention_dropout: Share | None = Field(default=None, ge=0.0, lt=1.0)
    """Dropout of attention probabilities, if it differs; null: the same as `dropout`. On GPUs FlexAttention
    has no dropout, so with ALiBi only flash-attn is fast."""
    activation_checkpointing: bool = False
    """Recompute each block in the backward pass, which saves memory at the cost of about a third more computation."""
    reset_positions: bool = True
    """Whether positions restart at 0 in each sequence. For study: false numbers positions through the pack; packed
    layout only. With relative positions (alibi, rotary) it makes a difference only where sequences attend to each
    other."""

    @model_validator(mode="after")
    def _check(self) -> "TransformerConfig":
        if self.shape["hidden_size"] % self.shape["heads"]:
            raise ValueError(
                f"hidden_size ({self.shape['hidden_size']}) must be a multiple of heads ({self.shape['heads']})"
            )
        if self.positions == "rotary" and self.head_dim % 2:
            raise ValueError(
                f"positions rotary rotates pairs of channels: hidden_size / heads must be even, found {self.head_dim}"
            )
        return self

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.shape["hidden_size"] // self.shape["heads"]

    @property
    def dropout_of_attention(self) -> float:
        """The rate at which attention probabilities are dropped in training."""
        return self.dropout if self.attention_dropout is None else self.attention_dropout

    @property
    def shape(self) -> dict[str, int]:
        """Layers, hidden size, heads and the other keys of the presets, with the overrides applied."""
        preset = self.presets[self.preset]
        return {name: getattr(self, name) or preset[name] for name in preset}

    def positions_needed(self, *, max_sequence_length: int, pack_length: int) -> int:
        """Returns the rows that a learned position table must have for such data, packed."""
        return max_sequence_length if self.reset_positions else pack_length

    @property
    def attention_windows(self) -> tuple[int | None, ...]:
        """The tokens on each side that a token sees, in each layer; None: all of its sequence."""
        return (None,) * self.shape["layers"]

    @property
    def windows(self) -> tuple[int, ...]:
        """The different windows of the layers, ascending; empty if each layer sees whole sequences."""
        return tuple(sorted({window for window in self.attention_windows if window is not None}))

    @property
    def losses(self) -> tuple[Loss, ...]:
        """The losses that the model returns, each with what divides it, the main one first."""
        return (NEXT_TOKEN,)

    @property
    def predicts_next_sentence(self) -> bool:
        """Whether the model has a head and a loss for next-sentence prediction."""
        return any(loss.name == NEXT_SENTENCE.name for loss in self.losses)

    @property
    def denominators(self) -> Literal["exact", "expected", "micro_batch"]:
        """Whether losses are divided by the counts of the step, of an average step, or of each micro-batch.

        In the last case tokens of different micro-batches have different weights.
        """
        return "exact"

    @property
    def unseen_in_weights(self) -> dict[str, Any]:
        """Keys that affect the computation and cannot be inferred from the names and shapes of the tensors."""
        return {"kind": self.kind, "heads": self.shape["heads"]}

    @property
    def study_switches(self) -> dict[str, str]:
        """Keys of this section, with their values, that are for study only, each with its meaning."""
        if self.reset_positions:
            return {}
        return {"model.reset_positions is false": "positions continue from one sequence of a pack to the next"}


class RotaryScaling(Section):
    """Rotations that turn more slowly, so that a model reaches over longer sequences than it was first trained on.

    Pairs of channels with wavelengths that are long against `original_positions` turn `factor` times more slowly, those
    with short ones as before, and those between by a mean of both.

    Source: Llama 3.1 (Grattafiori et al. 2024, arXiv:2407.21783), as released: transformers' rope_type `llama3`.
    """

    factor: float = Field(default=8.0, ge=1.0)
    """How many times more slowly the pairs with long wavelengths turn."""
    low_frequency_factor: float = Field(default=1.0, gt=0.0)
    """Pairs that turn less often than this within `original_positions` turn by `factor` more slowly."""
    high_frequency_factor: float = Field(default=4.0, gt=0.0)
    """Pairs that turn more often than this within `original_positions` stay as they are."""
    original_positions: Positions = Field(default=8192, ge=1)
    """Positions of the training before."""

    @model_validator(mode="after")
    def _check_order(self) -> "RotaryScaling":
        if self.low_frequency_factor >= self.high_frequency_factor:
            raise ValueError(
                f"low_frequency_factor ({self.low_frequency_factor:g}) must be below high_frequency_factor "
                f"({self.high_frequency_factor:g})"
            )
        return self


class DecoderConfig(TransformerConfig):
    """The `model:` section of decoders."""

    rotary_base: float = Field(default=ROTARY_BASE, gt=0.0)
    """Base of `positions: rotary`, where pair i of a head's channels is rotated by base^(-2i / head_dim) from one
    position to the next; for rotary positions alone."""

    @model_validator(mode="after")
    def _check_positions(self) -> "DecoderConfig":
        if self.positions != "rotary" and self.rotary_base != ROTARY_BASE:
            raise ValueError(f"rotary_base is for positions rotary, and positions is {self.positions}: leave it out")
        return self

    @property
    def scaled_rotations(self) -> RotaryScaling | None:
        """The scaling of rotary positions; None: they are as `rotary_base` says."""
        return None

    @property
    def unseen_in_weights(self) -> dict[str, Any]:
        kind = {} if self.positions == "learned" else {"positions": self.positions}
        base = {"rotary_base": self.rotary_base} if self.positions == "rotary" else {}
        return super().unseen_in_weights | kind | base
