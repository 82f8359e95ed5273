"""The memory that `linear_cross_entropy` takes on a GPU, by formula; needs no device.

Shapes: T = tokens, C = hidden size, V = vocabulary, N = tokens of a chunk.
"""

from dataclasses import dataclass

from evenpack.kernels.cross_entropy import default_chunk_tokens

_FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class LossBytes:
    """Bytes of the loss of one micro-batch."""

    gradients: int
    """The FP32 gradients of the hidden states and of the output matrix, which the forward pass computes."""
    chunk: int
    """The most that a chunk holds beside them: its logits, and the output matrix in the type of the products."""


def loss_bytes(*, tokens: int, hidden_size: int, vocabulary_size: int, number_bytes: int) -> LossBytes:
    """Returns the memory of a loss over FP32 hidden states that autograd will differentiate.

    Args:
        number_bytes: of the type of the matrix products: 2 under bf16 autocast, 4 in FP32.
    """
    is_cast = number_bytes != _FP32_BYTES
    matrix = hidden_size * vocabulary_size
    chunks = max(1, -(-tokens // default_chunk_tokens("cuda", vocabulary_size)))
    chunk_tokens = -(-tokens // chunks)
    logits = _FP32_BYTES * chunk_tokens * vocabulary_size
    gradient = number_bytes * chunk_tokens * vocabulary_size
    cast_matrix = number_bytes * matrix if is_cast else 0
    # Computing a chunk's logits takes them in both types, beside the gradient of the chunk before.
    computing = logits + (gradient if is_cast else 0) + (gradient if chunks > 1 else 0)
    rows = number_bytes * chunk_tokens * hidden_size if is_cast else 0
    return LossBytes(
        gradients=_FP32_BYTES * (tokens * hidden_size + matrix),
        chunk=cast_matrix + rows + computing,
    )
