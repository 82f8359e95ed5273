"""GPT-2: a pre-norm decoder (Radford et al. 2019)."""

from typing import Any

from evenpack.models.families import ModelFamily
from evenpack.models.gpt2.config import Gpt2Config
from evenpack.models.gpt2.cost import GPT2_COST


def _load_model() -> type[Any]:
    from evenpack.models.gpt2.model import Gpt2

    return Gpt2


def _load_huggingface() -> Any:
    from evenpack.models.gpt2.huggingface import GPT2_MAPPING

    return GPT2_MAPPING


GPT2 = ModelFamily(
    name="gpt2",
    config=Gpt2Config,
    causal=True,
    objective="next_tokens",
    recipes=("documents", "concat", "padding"),
    cost=GPT2_COST,
    load_model=_load_model,
    load_huggingface=_load_huggingface,
    load_foreign=None,
)
