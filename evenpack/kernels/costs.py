"""What attention and the loss cost as single operators: products and memory. Needs no device.

They are the two things of a model that are not made of torch's operators, so each states here what it does;
`models/trace.py` counts everything else on the model itself.

Shapes: T = slots, H = heads, G = key/value heads, D = head_dim, R = rows of the loss, C = hidden size, V = vocabulary.
"""

from evenpack.kernels.cross_entropy import default_chunk_tokens, whole_tiles
from evenpack.units import FP32_BYTES

PRODUCTS_OF_A_PAIR = 2
"""A score and the weighted value: one multiplication and addition for each channel, twice."""


def attention_products(*, heads: int, head_dim: int) -> int:
    """Returns the operations of a forward pass for each attended pair of slots, in all heads of a layer."""
    return 2 * PRODUCTS_OF_A_PAIR * heads * head_dim


def attention_buffers(*, slots: int, heads: int, key_value_heads: int, head_dim: int, number_bytes: int) -> int:
    """Returns what FlashAttention 2's backward pass holds while it runs.

    These are the gradient of the queries in FP32, a number for each row, and where heads share keys and values the
    gradients of these for each head. The rows between segments, which are few, are left out.
    """
    repeated = 2 * number_bytes * heads * head_dim if key_value_heads != heads else 0
    return slots * (FP32_BYTES * heads * (head_dim + 1) + repeated)


def loss_chunks(*, rows: int, vocabulary_size: int) -> int:
    """Returns the number of chunks into which `linear_cross_entropy` divides its rows on CUDA."""
    return max(1, -(-rows // default_chunk_tokens("cuda", vocabulary_size)))


def loss_chunk_bytes(*, rows: int, hidden_size: int, vocabulary_size: int, number_bytes: int) -> int:
    """Returns the most that a chunk of the loss holds beside the gradients, which `models/trace.py` counts.

    That is its logits, and the output matrix in the type of the products. The hidden states are FP32, and autograd will
    differentiate.

    Args:
        number_bytes: of the type of the matrix products: 2 under bf16 autocast, 4 in FP32.
    """
    is_cast = number_bytes != FP32_BYTES
    chunks = loss_chunks(rows=rows, vocabulary_size=vocabulary_size)
    entries = whole_tiles(vocabulary_size) if is_cast else vocabulary_size
    chunk_rows = -(-rows // chunks)
    logits = FP32_BYTES * chunk_rows * vocabulary_size
    products = number_bytes * chunk_rows * entries
    cast = number_bytes * hidden_size * (entries + chunk_rows) if is_cast else 0
    # A chunk's logits become their gradient in place, in both types if they differ. The next product begins beside it.
    return cast + logits + (products if is_cast or chunks > 1 else 0)
