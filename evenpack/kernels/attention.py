"""The one attention function: softmax(q k^T / sqrt(D)) v within each segment of a pack, on any backend.

Shapes: T = slots, H = heads, G = key/value heads, D = head_dim, S = segments.

    q [T, H, D], k, v [T, G, D], segments
      ->  resolve_backend  ->  reference | sdpa | varlen | flash | flash4 | flex  ->  [T, H, D]
"""

from functools import partial
from itertools import pairwise
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from evenpack.kernels import flash, flash4, flex, reference, sdpa, varlen
from evenpack.kernels.capabilities import AttentionRequest, resolve_backend
from evenpack.kernels.segments import Segments
from evenpack.kernels.shared import constant_when_compiled, one_operator


class AttentionBackend(Protocol):
    """The signature of each backend's `attend`."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, *, dropout: float, window: int | None
    ) -> Tensor: ...


BACKENDS: dict[str, AttentionBackend] = {
    "reference": reference.attend,
    "sdpa": sdpa.attend,
    "varlen": varlen.attend,
    "flash": flash.attend,
    "flash4": flash4.attend,
    "flex": flex.attend,
}


@one_operator
def packed_attention(
    q: Float[Tensor, " T H D"],
    k: Float[Tensor, " T G D"],
    v: Float[Tensor, " T G D"],
    segments: Segments,
    *,
    dropout: float = 0.0,
    window: int | None = None,
    backend: str = "auto",
    merged: Float[Tensor, " T H_plus_2_G D"] | None = None,
) -> Float[Tensor, " T H D"]:
    """Computes attention within segments; no slot attends across a boundary of `segments`.

    Under autocast q, k and v are computed in the autocast dtype, as in any matrix product.

    Args:
        q: queries.
        k: keys, of as many heads or fewer: neighbouring query heads then share one (grouped queries).
        v: values, of as many heads as the keys.
        segments: where segments begin and end, and what a slot sees of its own.
        dropout: fraction of attention probabilities set to zero; the caller passes 0 when it evaluates.
        window: tokens on each side that a position sees, besides itself: those with |i - j| <= window; None: all of
            its segment.
        backend: `auto`, or a name in `BACKENDS`.
        merged: q, k and v side by side, where they are parts of one tensor: a backend that can reads it in place of
            them, and its gradient is then computed as one.

    Raises:
        BackendError: the named backend cannot serve.
        ValueError: shapes or boundaries do not fit. Boundaries are checked only on a CPU, because a GPU would have to
            wait, and not in compiled code.
    """
    device_type = q.device.type
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    _check_arguments(q, k, v, segments)
    if window is not None and window < 1:
        raise ValueError(f"a window is the tokens on each side that are seen, at least 1, found {window}; None: all")
    name = _backend_for(
        backend,
        device_type=device_type,
        dtype=q.dtype,
        head_dim=q.shape[2],
        causal=segments.causal,
        alibi=segments.alibi_slopes is not None,
        dropout=True if dropout > 0 else False,  # noqa: SIM210 - the comparison alone may be symbolic when compiled
        window=window is not None,
    )
    attend = BACKENDS[name]
    if name == "flash4" and merged is not None:
        attend = partial(flash4.attend, merged=merged.to(q.dtype))
    # Autocast has chosen the dtype. If left on, it would round the oracle's FP32 and the ALiBi bias to 8 bits.
    with torch.autocast(device_type, enabled=False):
        return attend(q, k, v, segments, dropout=dropout, window=window)


@constant_when_compiled
def _backend_for(
    backend: str,
    *,
    device_type: str,
    dtype: torch.dtype,
    head_dim: int,
    causal: bool,
    alibi: bool,
    dropout: bool,
    window: bool,
) -> str:
    """Returns the backend that serves; compiled code asks once, when it is made."""
    request = AttentionRequest(
        device_type=device_type,
        dtype=dtype,
        head_dim=head_dim,
        causal=causal,
        alibi=alibi,
        dropout=dropout,
        window=window,
    )
    return resolve_backend(backend, request)


def _check_arguments(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> None:
    if q.dim() != 3 or k.shape != v.shape or q.shape[::2] != k.shape[::2]:
        raise ValueError(f"expected q of shape [T, H, D], k and v of [T, G, D], found {_shapes(q, k, v)}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"the heads of k and v ({k.shape[1]}) must divide the heads of q ({q.shape[1]}), found {_shapes(q, k, v)}"
        )
    cu_seqlens, longest = segments.cu_seqlens, segments.max_sequence_length
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1:
        raise ValueError(f"cu_seqlens must be int32 [S + 1], found {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}")
    if cu_seqlens.device.type != "cpu" or torch.compiler.is_compiling():
        return
    borders = cu_seqlens.tolist()
    lengths = [stop - start for start, stop in pairwise(borders)]
    if not lengths or borders[0] != 0 or borders[-1] != q.shape[0] or min(lengths) < 0:
        raise ValueError(f"cu_seqlens must rise from 0 to {q.shape[0]} (the slots of q), found {borders}")
    if max(lengths) > longest:
        raise ValueError(f"a segment of {max(lengths)} slots is longer than max_sequence_length={longest}")


def _shapes(*tensors: Tensor) -> str:
    return ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
