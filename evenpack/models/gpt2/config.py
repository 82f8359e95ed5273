"""GPT-2, a pre-norm decoder (Radford et al. 2019): its `model:` section, and the family."""

from typing import ClassVar, Literal

from evenpack.models.common.section import DecoderConfig
from evenpack.models.families import ModelFamily


class Gpt2Config(DecoderConfig):
    """GPT-2, pretrained on next tokens."""

    presets: ClassVar[dict[str, dict[str, int]]] = {
        "tiny": {"layers": 2, "hidden_size": 128, "heads": 2},
        "mini": {"layers": 4, "hidden_size": 256, "heads": 4},
        "small": {"layers": 12, "hidden_size": 768, "heads": 12},
        "medium": {"layers": 24, "hidden_size": 1024, "heads": 16},
        "large": {"layers": 36, "hidden_size": 1280, "heads": 20},
        "xl": {"layers": 48, "hidden_size": 1600, "heads": 25},
    }
    """Radford et al. 2019, table 2; tiny and mini are ours, for CPUs."""

    kind: Literal["gpt2"]
    preset: Literal["tiny", "mini", "small", "medium", "large", "xl"] = "small"
    """Sizes of Radford et al. 2019, table 2; tiny and mini are small enough for CPUs."""
    positions: Literal["learned", "alibi", "rotary"] = "learned"
    """Encoding of positions: a learned table, ALiBi's biases of attention scores, or rotations of queries and keys."""


GPT2 = ModelFamily(
    config=Gpt2Config,
    causal=True,
    objective="next_tokens",
    recipes=("documents", "concat", "padding"),
    model="evenpack.models.gpt2.model:Gpt2",
    huggingface="evenpack.models.gpt2.huggingface:GPT2_MAPPING",
)
