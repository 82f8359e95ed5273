"""Llama: a pre-norm decoder with rotary positions, RMSNorm, SwiGLU and grouped queries (Touvron et al. 2023)."""

from typing import Any

from evenpack.models.families import ModelFamily
from evenpack.models.llama.config import LlamaConfig
from evenpack.models.llama.cost import LLAMA_COST


def _load_model() -> type[Any]:
    from evenpack.models.llama.model import Llama

    return Llama


def _load_huggingface() -> Any:
    from evenpack.models.llama.huggingface import LLAMA_MAPPING

    return LLAMA_MAPPING


LLAMA = ModelFamily(
    name="llama",
    config=LlamaConfig,
    causal=True,
    objective="next_tokens",
    recipes=("documents", "concat", "padding"),
    cost=LLAMA_COST,
    load_model=_load_model,
    load_huggingface=_load_huggingface,
    load_foreign=None,
)
