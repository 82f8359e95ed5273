"""What a model computes, layer by layer, as far as its bytes and kernels depend on it; needs no torch.

A family's `cost.outline` returns it. `traffic.py` counts bytes and kernels from it, and the operations that it finds
equal those of the family's own formula.
"""

from dataclasses import dataclass

from evenpack.models.common.section import FEED_FORWARD_RATIO, TransformerConfig


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A linear layer."""

    inputs: int
    outputs: int
    has_bias: bool

    @property
    def elements(self) -> int:
        """Returns the elements of the weight, without the bias."""
        return self.inputs * self.outputs

    @property
    def tensors(self) -> int:
        """Returns the parameters that it has: a weight, and perhaps a bias."""
        return 2 if self.has_bias else 1


@dataclass(frozen=True, kw_only=True)
class BlockOutline:
    """A block of attention and a feed-forward layer, with a norm and a sum with the residual stream for each."""

    width: int
    """C: channels of the residual stream and of all queries."""
    key_value_size: int
    """Channels of all keys, or of all values."""
    feed_forward_size: int
    """Channels inside the feed-forward layer."""
    is_gated: bool
    """Whether the feed-forward layer multiplies two inner values, of which one went through the activation."""
    has_biases: bool
    """Whether linear layers and norms have biases."""
    rotary_head_size: int
    """Channels of a head whose queries and keys are rotated; 0: none are."""
    has_dropout: bool
    """Whether values are dropped before each sum with the residual stream."""

    @property
    def attention_matrices(self) -> tuple[Matrix, Matrix]:
        """Returns the projections into and out of attention."""
        merged = self.width + 2 * self.key_value_size
        return self._matrix(self.width, merged), self._matrix(self.width, self.width)

    @property
    def feed_forward_matrices(self) -> tuple[Matrix, Matrix]:
        """Returns the two linear layers of the feed-forward layer; a gated one computes two values by its first."""
        expanded = (2 if self.is_gated else 1) * self.feed_forward_size
        return self._matrix(self.width, expanded), self._matrix(self.feed_forward_size, self.width)

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """Returns all linear layers."""
        return (*self.attention_matrices, *self.feed_forward_matrices)

    @property
    def tensors(self) -> int:
        """Returns the number of parameters' tensors."""
        norms = 2 * (2 if self.has_biases else 1)
        return norms + sum(matrix.tensors for matrix in self.matrices)

    def _matrix(self, inputs: int, outputs: int) -> Matrix:
        return Matrix(inputs=inputs, outputs=outputs, has_bias=self.has_biases)


@dataclass(frozen=True, kw_only=True)
class ModelOutline:
    """Embedding, equal blocks, and an output head over the vocabulary."""

    layers: int
    block: BlockOutline
    is_causal: bool
    vocabulary_size: int
    tables: int
    """Embedding tables that are looked up and added: of tokens, positions, token types."""
    has_embedding_norm: bool
    has_final_norm: bool
    is_head_tied: bool
    """Whether the output matrix is the token embedding."""
    head_matrix: Matrix | None
    """A linear layer, followed by GELU and a norm, between the blocks and the output matrix."""
    has_output_bias: bool
    sequence_matrices: tuple[Matrix, ...] = ()
    """Linear layers that run at the first token of each sequence."""

    @property
    def tensors(self) -> int:
        """Returns the number of parameters' tensors."""
        norms = int(self.has_embedding_norm) + int(self.has_final_norm) + int(self.head_matrix is not None)
        matrices = [*self.sequence_matrices, *([self.head_matrix] if self.head_matrix else [])]
        output = int(self.has_output_bias) + int(not self.is_head_tied)
        per_norm = 2 if self.block.has_biases else 1
        return (
            self.tables
            + self.layers * self.block.tensors
            + per_norm * norms
            + sum(matrix.tensors for matrix in matrices)
            + output
        )


def gelu_block_outline(config: TransformerConfig) -> BlockOutline:
    """Returns a block with biases, GELU, and as many heads of keys and values as of queries."""
    width = config.shape["hidden_size"]
    return BlockOutline(
        width=width,
        key_value_size=width,
        feed_forward_size=FEED_FORWARD_RATIO * width,
        is_gated=False,
        has_biases=True,
        rotary_head_size=width // config.shape["heads"] if config.positions == "rotary" else 0,
        has_dropout=config.dropout > 0.0,
    )
