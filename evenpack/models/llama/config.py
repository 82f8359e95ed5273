"""Llama, a pre-norm decoder with rotary positions, RMSNorm, SwiGLU and grouped queries (Touvron et al. 2023).

Its `model:` section, and the family.
"""

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from evenpack.models.common.section import DecoderConfig, RotaryScaling
from evenpack.models.families import ModelFamily
from evenpack.units import Channels, Heads


class LlamaConfig(DecoderConfig):
    """Llama: rotary positions, RMSNorm, SwiGLU, grouped queries, no biases."""

    presets: ClassVar[dict[str, dict[str, int]]] = {
        "tiny": {"layers": 2, "hidden_size": 128, "heads": 4, "key_value_heads": 2, "feed_forward_size": 352},
        "160m": {"layers": 12, "hidden_size": 768, "heads": 12, "key_value_heads": 12, "feed_forward_size": 3072},
        "1.1b": {"layers": 22, "hidden_size": 2048, "heads": 32, "key_value_heads": 4, "feed_forward_size": 5632},
        "8b": {"layers": 32, "hidden_size": 4096, "heads": 32, "key_value_heads": 8, "feed_forward_size": 14_336},
    }
    """160m is JackFram/llama-160m (Miao et al. 2023, SpecInfer, arXiv:2305.09781), 1.1b is TinyLlama (Zhang et al.
    2024, arXiv:2401.02385), 8b is Llama 3.1 8B (Grattafiori et al. 2024, arXiv:2407.21783, table 3); tiny is ours, for
    CPUs."""

    kind: Literal["llama"]
    preset: Literal["tiny", "160m", "1.1b", "8b"] = "160m"
    """Sizes of JackFram/llama-160m, of TinyLlama (1.1b) and of Llama 3.1 8B, whose rotary_base (500,000) and
    rotary_scaling (the defaults of its keys) are then the defaults; tiny is small enough for CPUs."""
    positions: Literal["rotary"] = "rotary"
    """Encoding of positions: rotations of queries and keys."""
    rotary_scaling: RotaryScaling | None = None
    """Scaling of the rotations for longer sequences, as Llama 3.1 has it (rope_type `llama3` of transformers); null:
    none."""
    key_value_heads: Heads | None = Field(default=None, ge=1)
    """Heads of keys and values, a divisor of heads: groups of query heads share them. Null: as in the preset."""
    feed_forward_size: Channels | None = Field(default=None, ge=1)
    """Width inside the feed-forward layer; null: the preset's width."""
    norm_epsilon: float = Field(default=1e-5, gt=0.0)
    """Number that RMSNorm adds to the mean square; 1e-6 in the first Llama, 1e-5 since the second."""
    tied_head: bool = False
    """Whether the LM head shares its weights with the token embedding."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in_rotations(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("preset") == "8b":
            return {"rotary_base": 500_000.0, "rotary_scaling": {}} | values
        return values

    @model_validator(mode="after")
    def _check_groups(self) -> "LlamaConfig":
        heads, key_value_heads = self.shape["heads"], self.shape["key_value_heads"]
        if heads % key_value_heads:
            divisors = [str(count) for count in range(1, heads + 1) if heads % count == 0]
            raise ValueError(
                f"key_value_heads ({key_value_heads}) must divide heads ({heads}): one of {', '.join(divisors)}"
            )
        return self

    @property
    def key_value_size(self) -> int:
        """Channels of all keys, or of all values."""
        return self.shape["key_value_heads"] * self.head_dim

    @property
    def scaled_rotations(self) -> RotaryScaling | None:
        return self.rotary_scaling

    @property
    def unseen_in_weights(self) -> dict[str, Any]:
        scaling = {} if self.rotary_scaling is None else {"rotary_scaling": self.rotary_scaling.model_dump()}
        return super().unseen_in_weights | {"norm_epsilon": self.norm_epsilon} | scaling


LLAMA = ModelFamily(
    config=LlamaConfig,
    causal=True,
    objective="next_tokens",
    recipes=("documents", "concat", "padding"),
    model="evenpack.models.llama.model:Llama",
    huggingface="evenpack.models.llama.huggingface:LLAMA_MAPPING",
)
