"""Attention through the flash-attn package: the only varlen kernel that has both ALiBi and dropout.

The package is optional. A missing or broken installation is a reason not to use this backend, never a crash:
compiled against another PyTorch it fails at import with an OSError or an undefined symbol.
"""

import importlib

import torch
from jaxtyping import Float, Int32
from torch import Tensor


def import_failure() -> str | None:
    """Returns the reason why flash-attn cannot be used here, in a line; None if it can."""
    try:
        package = importlib.import_module("flash_attn")
    except ModuleNotFoundError as error:
        if error.name == "flash_attn":
            return "flash-attn is not installed"
        return f"flash-attn is installed but needs the missing module '{error.name}'"
    except Exception as error:  # whatever a broken binary raises
        message = (str(error).strip() or type(error).__name__).splitlines()[0]
        return f"flash-attn is installed but cannot be imported: {message}"
    if not hasattr(package, "flash_attn_varlen_func"):  # flash-attn 4 alone brings only flash_attn.cute
        return "flash-attn is installed but has no flash_attn_varlen_func: version 2 is needed"
    return None


def attend(
    q: Float[Tensor, " T H D"],
    k: Float[Tensor, " T G D"],
    v: Float[Tensor, " T G D"],
    cu_seqlens: Int32[Tensor, " S_plus_1"],
    max_sequence_length: int,
    *,
    causal: bool,
    alibi_slopes: Float[Tensor, " H"] | None,
    dropout: float,
    window: int | None = None,
) -> Float[Tensor, " T H D"]:
    """Runs FlashAttention 2 over the segments; its backward is deterministic if PyTorch is told to be."""
    from flash_attn import flash_attn_varlen_func  # a statement, which compiled code can hold

    span = {} if window is None else {"window_size": (window, 0 if causal else window)}
    output: Tensor = flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens.view(-1),  # the same numbers: torch.compile refuses one tensor as two arguments of the package
        max_sequence_length,
        max_sequence_length,
        dropout_p=dropout,
        causal=causal,
        alibi_slopes=None if alibi_slopes is None else alibi_slopes.float(),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        **span,
    )
    return output
