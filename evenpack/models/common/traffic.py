"""The operations, bytes and kernels of forward and backward over a micro-batch, from a model's outline.

They are those of the code as it is, without `torch.compile`: FP32 parameters, bfloat16 autocast, no activation
checkpointing, an attention kernel that keeps no scores. Every operator is one kernel that reads its inputs from
memory and writes its results there; caches are left out, and so are operators on a few numbers. Each kind of kernel
has a second count: what would remain of it if it were fused with its neighbours.

Shapes: T = slots, C = width, F = feed-forward size, V = vocabulary, R = rows of the output head.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from evenpack.kernels.cross_entropy import default_chunk_tokens
from evenpack.models.common.cost import PASSES, Work
from evenpack.models.common.memory import BF16_BYTES, FP32_BYTES, MASK_BYTES
from evenpack.models.common.outline import BlockOutline, Matrix, ModelOutline

Part = Literal[
    "embedding", "norms and sums", "projections", "attention", "feed-forward", "head and loss", "weights", "optimizer"
]
PARTS: tuple[Part, ...] = get_args(Part)

Fusion = Literal["compiled blocks", "fused head", "BF16 weights", "fused update"]
"""compiled blocks: one kernel for each chain of element-wise operators between two products (`torch.compile`). fused
head: logits stay BF16, and one kernel makes their gradient of them. BF16 weights: the optimizer writes the copies
that products read, and products add to FP32 gradients. fused update: gradients lie in one buffer, and one kernel
clips and updates."""
FUSIONS: tuple[Fusion, ...] = get_args(Fusion)

_BOTH = BF16_BYTES + FP32_BYTES
"""Bytes of a number that is read in one type and written in the other."""

_BOOKKEEPING = 14
"""Operators that copy the batch to the device, scale the loss and collect sums."""

_WITHIN_CHUNK = 19
"""Operators of a chunk of the loss in `kernels/cross_entropy.py` on a number for each row, or for all."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """All kernels of one kind."""

    part: Part
    kernels: int
    bytes: int
    """Bytes read and written."""
    flops: int = 0
    """Operations of matrix products, by the conventions of `cost.py`; those of attention are useful ones."""
    fusion: Fusion | None = None
    """What would make them cheaper; None: nothing here."""
    fused_kernels: int = 0
    """What remains under the fusion; the bytes likewise."""
    fused_bytes: int = 0

    def times(self, count: int) -> "Operation":
        """Returns the same kernels so many times."""
        return Operation(
            part=self.part,
            kernels=count * self.kernels,
            bytes=count * self.bytes,
            flops=count * self.flops,
            fusion=self.fusion,
            fused_kernels=count * self.fused_kernels,
            fused_bytes=count * self.fused_bytes,
        )

    def under(self, fusions: frozenset[Fusion]) -> "Operation":
        """Returns the kernels that remain where these fusions are made."""
        if self.fusion not in fusions:
            return self
        return Operation(part=self.part, kernels=self.fused_kernels, bytes=self.fused_bytes, flops=self.flops)


def gradient_operations(outline: ModelOutline, work: Work) -> list[Operation]:
    """Returns what forward and backward over a micro-batch of this work do; gradients are not added up."""
    block = [one.times(outline.layers) for one in _block(outline, work)]
    few = Operation(part="head and loss", kernels=_BOOKKEEPING, bytes=0)
    return [*_embedding(outline, work), *block, *_head(outline, work), *_sequence_heads(outline, work), few]


def accumulation_operations(outline: ModelOutline, parameters: int) -> list[Operation]:
    """Returns what adds the gradients of a micro-batch to those of the ones before it."""
    kernels, moved = outline.tensors, 3 * FP32_BYTES * parameters
    return [Operation(part="weights", kernels=kernels, bytes=moved, fusion="BF16 weights")]


def _block(outline: ModelOutline, work: Work) -> Iterator[Operation]:
    block, slots = outline.block, work.slots
    layers: tuple[tuple[Part, tuple[Matrix, Matrix]], ...] = (
        ("projections", block.attention_matrices),
        ("feed-forward", block.feed_forward_matrices),
    )
    for part, matrices in layers:
        for matrix in matrices:
            yield product(matrix, slots, part=part)
            yield weight_casts(matrix)
            if matrix.has_bias:
                yield bias_gradient(matrix, slots, part=part)
    yield from _norms_and_sums(block, slots)
    yield from _attention(outline, work)
    yield _activation(block, slots)


def product(matrix: Matrix, rows: int, *, part: Part) -> Operation:
    """Returns the three products of a linear layer: its result, and the gradients of its input and its weight."""
    moved = rows * (matrix.inputs + matrix.outputs) + matrix.elements
    flops = PASSES * 2 * rows * matrix.elements
    return Operation(part=part, kernels=PASSES, bytes=PASSES * BF16_BYTES * moved, flops=flops)


def weight_casts(matrix: Matrix) -> Operation:
    """Returns the casts of a layer's weight and bias for its products, and of their gradients after them."""
    elements = matrix.elements + (matrix.outputs if matrix.has_bias else 0)
    return Operation(part="weights", kernels=2 * matrix.tensors, bytes=2 * _BOTH * elements, fusion="BF16 weights")


def bias_gradient(matrix: Matrix, rows: int, *, part: Part) -> Operation:
    """Returns the sum of the results' gradients over rows, which a kernel that makes them can take along."""
    return Operation(part=part, kernels=1, bytes=BF16_BYTES * rows * matrix.outputs, fusion="compiled blocks")


def _norms_and_sums(block: BlockOutline, slots: int) -> Iterator[Operation]:
    """Yields the norms, the sums with the FP32 residual stream, and the casts between it and the products."""
    numbers = slots * block.width
    forward = 2 * (2 * FP32_BYTES)
    backward = 2 * (3 * FP32_BYTES)
    sums = 2 * (2 * FP32_BYTES + BF16_BYTES) + 2 * (3 * FP32_BYTES)
    casts = 6 * _BOTH
    # Forward: the branch and the stream are read, the sum and its norm written. Backward: the gradients of the norm's
    # result and of the stream and the stream itself are read, the stream's gradient is written in both types.
    fused = 2 * (2 * FP32_BYTES + 2 * BF16_BYTES) + 2 * (3 * FP32_BYTES + 2 * BF16_BYTES)
    yield Operation(
        part="norms and sums",
        kernels=2 + 2 + 4 + 6,
        bytes=(forward + backward + sums + casts) * numbers,
        fusion="compiled blocks",
        fused_kernels=2 + 4,  # the gradients of gains are summed in a second kernel
        fused_bytes=fused * numbers,
    )
    if block.has_dropout:
        dropped = 2 * (2 * BF16_BYTES + MASK_BYTES) + 2 * (2 * BF16_BYTES + MASK_BYTES)
        yield Operation(part="norms and sums", kernels=4, bytes=dropped * numbers, fusion="compiled blocks")


def _attention(outline: ModelOutline, work: Work) -> Iterator[Operation]:
    block = outline.block
    merged = block.width + 2 * block.key_value_size
    forward = merged + block.width
    backward = (merged + 2 * block.width) + merged
    pairs = work.attended_pairs(causal=outline.is_causal)
    yield Operation(
        part="attention",
        kernels=2,
        bytes=BF16_BYTES * work.slots * (forward + backward),  # and a number for each head, left out
        flops=PASSES * 2 * 2 * block.width * pairs,
    )
    yield Operation(
        part="attention", kernels=1, bytes=2 * BF16_BYTES * work.slots * merged
    )  # the three gradients joined
    if block.rotary_head_size:
        turned = (4 + 2 * 6 + 12 + 6) + (3 * 6 + 2 * 8 + 4 + 6)  # roll, products, sum and casts in each direction
        yield Operation(
            part="attention",
            kernels=2 * (5 + 7),
            bytes=turned * work.slots * (block.width + block.key_value_size),
            fusion="compiled blocks",
            fused_kernels=2,
            fused_bytes=4 * BF16_BYTES * work.slots * (block.width + block.key_value_size),
        )


def _activation(block: BlockOutline, slots: int) -> Operation:
    """Returns GELU, or SiLU and the product with the other value, in both directions."""
    numbers = BF16_BYTES * slots * block.feed_forward_size
    if not block.is_gated:
        return Operation(part="feed-forward", kernels=2, bytes=5 * numbers)
    # SiLU and product; in the backward pass two products, that of SiLU, and the two gradients joined.
    return Operation(
        part="feed-forward",
        kernels=6,
        bytes=((2 + 3) + (3 + 3 + 3 + 4)) * numbers,
        fusion="compiled blocks",
        fused_kernels=2,
        fused_bytes=((2 + 1) + (3 + 2)) * numbers,
    )


def _embedding(outline: ModelOutline, work: Work) -> Iterator[Operation]:
    block, tables = outline.block, outline.tables
    numbers = work.slots * block.width
    moved = tables * 2 * FP32_BYTES + (tables - 1) * 3 * FP32_BYTES + tables * FP32_BYTES
    norms = int(outline.has_embedding_norm) + int(outline.has_final_norm)
    moved += norms * 5 * FP32_BYTES
    kernels = tables + (tables - 1) + tables + 2 * norms
    if block.has_dropout:
        moved += 2 * (2 * FP32_BYTES + MASK_BYTES)
        kernels += 2
    # Angles, their sine, cosine and negated sine, for half of the channels of a head, each pair of halves joined.
    angles = (1 + 3 * 2) * FP32_BYTES * block.rotary_head_size // 2 + 2 * 2 * FP32_BYTES * block.rotary_head_size
    # The gradient of the token table is as large as the table; a tied head's is added to it.
    table = outline.vocabulary_size * block.width * FP32_BYTES * (4 if outline.is_head_tied else 1)
    yield Operation(
        part="embedding",
        kernels=kernels + int(outline.is_head_tied),
        bytes=moved * numbers + angles * work.slots + table,
    )


def _head(outline: ModelOutline, work: Work) -> Iterator[Operation]:
    """Yields the output head and its loss, as `kernels/cross_entropy.py` computes them chunk by chunk."""
    rows, vocabulary, width = work.head_slots, outline.vocabulary_size, outline.block.width
    if not rows:
        return
    yield from _head_layer(outline, work)
    chunks = -(-rows // default_chunk_tokens("cuda", vocabulary))
    elements = vocabulary * width
    yield Operation(
        part="head and loss",
        kernels=PASSES * chunks,
        # The matrix is read twice, and its FP32 gradient read and written by the product that is added to it.
        bytes=PASSES * BF16_BYTES * rows * (vocabulary + width) + chunks * (2 * BF16_BYTES + 2 * FP32_BYTES) * elements,
        flops=PASSES * 2 * rows * elements,
    )
    # Cast, largest, minus it, exponential, sum, times weight, cast back; with a bias: added, and its gradient summed.
    logits = _BOTH + FP32_BYTES + 2 * FP32_BYTES + 2 * FP32_BYTES + FP32_BYTES + 2 * FP32_BYTES + _BOTH
    logits += (2 * FP32_BYTES + FP32_BYTES) if outline.has_output_bias else 0
    wide = 7 + (3 if outline.has_output_bias else 0)
    yield Operation(
        part="head and loss",
        kernels=chunks * (wide + _WITHIN_CHUNK),
        bytes=logits * rows * vocabulary,
        fusion="fused head",
        fused_kernels=chunks,
        fused_bytes=2 * BF16_BYTES * rows * vocabulary,
    )
    # The weight is cast and its gradient set to zero, and multiplied in the backward pass.
    yield Operation(
        part="head and loss",
        kernels=2 + 1,
        bytes=(_BOTH + FP32_BYTES + 2 * FP32_BYTES) * elements,
        fusion="fused head",
        fused_kernels=1,
        fused_bytes=_BOTH * elements,
    )
    yield Operation(
        part="head and loss",
        kernels=chunks + 2,
        bytes=(2 * _BOTH + 2 * FP32_BYTES) * rows * width,
        fusion="fused head",
        fused_kernels=1,
        fused_bytes=_BOTH * rows * width,
    )


def _head_layer(outline: ModelOutline, work: Work) -> Iterator[Operation]:
    """Yields the linear layer before the output matrix, with the rows that are gathered for it."""
    matrix, rows = outline.head_matrix, work.head_slots
    if matrix is None:
        return
    yield product(matrix, rows, part="head and loss")
    yield weight_casts(matrix)
    yield bias_gradient(matrix, rows, part="head and loss")
    gathered = 2 * FP32_BYTES + 3 * FP32_BYTES  # and their gradients added to those of all slots, which begin at zero
    norm_and_gelu = 5 * FP32_BYTES + 5 * BF16_BYTES + 4 * _BOTH
    moved = (gathered + norm_and_gelu) * rows * matrix.inputs
    yield Operation(part="head and loss", kernels=11, bytes=moved + _spread(work, matrix))


def _sequence_heads(outline: ModelOutline, work: Work) -> Iterator[Operation]:
    """Yields the layers at first tokens, which are few: their kernels count, and the gradient that is spread."""
    if not outline.sequence_matrices or not work.sequences:
        return
    for matrix in outline.sequence_matrices:
        yield product(matrix, work.sequences, part="head and loss")
        yield weight_casts(matrix)
    yield Operation(
        part="head and loss",
        kernels=26,
        bytes=_spread(work, outline.sequence_matrices[0]) + 3 * FP32_BYTES * work.slots * outline.block.width,
    )


def _spread(work: Work, matrix: Matrix) -> int:
    """Returns the bytes of a gradient over all slots that is zero but for some rows: set to zero, copied, added to."""
    return (FP32_BYTES + 2 * FP32_BYTES) * work.slots * matrix.inputs
