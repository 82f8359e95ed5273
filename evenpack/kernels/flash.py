"""Attention through the flash-attn package: the only varlen kernel that has both ALiBi and dropout.

The package is optional. A missing or broken installation is a reason not to use this backend, never a crash:
compiled against another PyTorch it fails at import with an OSError or an undefined symbol.
"""

import importlib

import torch
from torch import Tensor

from evenpack.kernels.segments import Heads, Segments, SharedHeads

_MISSING = "flash-attn is not installed"


def import_failure() -> str | None:
    """Returns the reason why flash-attn cannot be used here, in a line; None if it can."""
    try:
        package = importlib.import_module("flash_attn")
    except ModuleNotFoundError as error:
        if error.name == "flash_attn":
            return _MISSING
        return f"flash-attn is installed but needs the missing module '{error.name}'"
    except Exception as error:  # whatever a broken binary raises
        message = (str(error).strip() or type(error).__name__).splitlines()[0]
        return f"flash-attn is installed but cannot be imported: {message}"
    if hasattr(package, "__path__") and getattr(package, "__file__", None) is None:  # flash-attn-4's folder
        return _MISSING
    if not hasattr(package, "flash_attn_varlen_func"):
        return "flash-attn is installed but has no flash_attn_varlen_func: version 2 is needed"
    return None


def attend(
    q: Heads, k: SharedHeads, v: SharedHeads, segments: Segments, *, dropout: float = 0.0, window: int | None = None
) -> Heads:
    """Runs FlashAttention 2 over the segments; its backward is deterministic if PyTorch is told to be."""
    from flash_attn import flash_attn_varlen_func  # a statement, which compiled code can hold

    borders, longest, slopes = segments.cu_seqlens, segments.max_sequence_length, segments.alibi_slopes
    span = {} if window is None else {"window_size": (window, 0 if segments.causal else window)}
    output: Tensor = flash_attn_varlen_func(
        q,
        k,
        v,
        borders,
        borders.view(-1),  # the same numbers: torch.compile refuses one tensor as two arguments of the package
        longest,
        longest,
        dropout_p=dropout,
        causal=segments.causal,
        alibi_slopes=None if slopes is None else slopes.float(),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        **span,
    )
    return output
