"""ModernBERT, a pre-norm encoder with windows of attention that learns from masked tokens (Warner et al. 2024).

Its `model:` section, and the family.
"""

from typing import Any, ClassVar, Literal

from pydantic import Field

from evenpack.losses import MASKED_TOKEN, Loss
from evenpack.models.common.section import ROTARY_BASE, TransformerConfig
from evenpack.models.families import ModelFamily
from evenpack.units import Channels, Layers, Tokens


class ModernBertConfig(TransformerConfig):
    """ModernBERT: rotary positions, GeGLU, no biases; most layers see a window of their sequence alone."""

    presets: ClassVar[dict[str, dict[str, int]]] = {
        "tiny": {"layers": 4, "hidden_size": 128, "heads": 2, "feed_forward_size": 192},
        "base": {"layers": 22, "hidden_size": 768, "heads": 12, "feed_forward_size": 1152},
        "large": {"layers": 28, "hidden_size": 1024, "heads": 16, "feed_forward_size": 2624},
    }
    """Warner et al. 2024 (arXiv:2412.13663), table 4; tiny is ours, for CPUs."""

    kind: Literal["modernbert"]
    preset: Literal["tiny", "base", "large"] = "base"
    """Sizes of Warner et al. 2024, table 4; tiny is small enough for CPUs."""
    positions: Literal["rotary"] = "rotary"
    """Encoding of positions: rotations of queries and keys."""
    feed_forward_size: Channels | None = Field(default=None, ge=1)
    """Width inside the feed-forward layer; null: the preset's width."""
    window: Tokens = Field(default=64, ge=1, le=1 << 24)
    """Tokens on each side that a token sees in a local layer, besides itself; half of transformers' local_attention."""
    global_every_layers: Layers = Field(default=3, ge=1, le=1 << 12)
    """Distance of the layers in which a token sees all of its sequence. The first layer is one, then every so many; the
    number of layers need not be a multiple (base has 22). 1: no layer has a window."""
    rotary_base: float = Field(default=160_000.0, gt=0.0)
    """Base of the rotations in global layers: pair i of a head's channels is rotated by base^(-2i / head_dim) from one
    position to the next."""
    local_rotary_base: float = Field(default=ROTARY_BASE, gt=0.0)
    """The same in local layers."""
    norm_epsilon: float = Field(default=1e-5, gt=0.0)
    """Number that LayerNorm adds to the variance."""

    @property
    def attention_windows(self) -> tuple[int | None, ...]:
        layers = range(self.shape["layers"])
        return tuple(self.window if layer % self.global_every_layers else None for layer in layers)

    @property
    def losses(self) -> tuple[Loss, ...]:
        return (MASKED_TOKEN,)

    @property
    def unseen_in_weights(self) -> dict[str, Any]:
        keys = ("window", "rotary_base", "local_rotary_base", "norm_epsilon")
        # A distance of more than the layers is no other network: the first layer alone sees all of its sequence.
        distance = min(self.global_every_layers, self.shape["layers"])
        return super().unseen_in_weights | {"global_every_layers": distance} | {key: getattr(self, key) for key in keys}


MODERNBERT = ModelFamily(
    config=ModernBertConfig,
    causal=False,
    objective="masked_tokens",
    recipes=("documents", "concat"),
    model="evenpack.models.modernbert.model:ModernBert",
    huggingface="evenpack.models.modernbert.huggingface:MODERNBERT_MAPPING",
)
