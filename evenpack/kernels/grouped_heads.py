"""Grouped-query attention: neighbouring query heads share one head of keys and values.

Shapes: T = slots, H = query heads, G = key/value heads, D = head_dim; G divides H.

Source: Ainslie et al. 2023, GQA: Training Generalized Multi-Query Transformer Models (arXiv:2305.13245), section 2.2.
"""

from jaxtyping import Float
from torch import Tensor


def repeat_heads(keys_or_values: Float[Tensor, " T G D"], query_heads: int) -> Float[Tensor, " T H D"]:
    """Returns each key/value head repeated for the query heads that share it; no copy if they are as many."""
    group = query_heads // keys_or_values.shape[1]
    return keys_or_values if group == 1 else keys_or_values.repeat_interleave(group, dim=1)
