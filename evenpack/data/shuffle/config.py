"""The section `data.shuffle:`, the way in which the training sequences of a source are put into random order."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ByteSize, Field

from evenpack.config import Section
from evenpack.units import Shards, Tokens

_BLOCK_TOKENS = 1 << 26


class PermutationShuffle(Section):
    """Each epoch draws a permutation of the whole source, by arithmetic; the files stay as they are.

    Every step reads its sequences from anywhere in the token file, which needs a disk with fast random access, or
    memory that holds the file.
    """

    kind: Literal["permutation"] = "permutation"


class BlockShuffle(Section):
    """Blocks of the corpus in its own order, each shuffled within itself alone.

    For corpora that are in random order already; where neighbours are alike, the loss jumps from block to block.
    """

    kind: Literal["blocks"]
    block_tokens: Tokens = Field(default=_BLOCK_TOKENS, ge=1)
    """Tokens of a block, as nearly as whole sequences allow."""


class GridShuffle(Section):
    """The sequences are written again in random order, once, by two passes over a grid of shards.

    Training reads the result block by block, from front to back.
    """

    kind: Literal["grid"]
    memory: Annotated[ByteSize, Field(ge=1)] = ByteSize(4 << 30)
    """Memory that the process may fill while it shuffles, for example 4GiB; it decides the grid."""
    rows: Shards | None = Field(default=None, ge=1, le=1 << 16)
    """Rows of the grid, the shards of a column; null is as few as the memory allows."""
    columns: Shards | None = Field(default=None, ge=1, le=1 << 16)
    """Columns of the grid, the shards of a row; null is as few as the memory allows."""
    block_tokens: Tokens = Field(default=_BLOCK_TOKENS, ge=1)
    """Tokens of a block, as nearly as whole sequences allow."""
    seed: int = Field(default=42, ge=0, lt=1 << 63)
    """Seed of the order in the files; the run's seed decides the order of each epoch within and among blocks."""


def _kind_alone(value: Any) -> Any:
    """Accepts `shuffle: grid` as short for `shuffle: {kind: grid}`."""
    return {"kind": value} if isinstance(value, str) else value


_ShuffleSection = Annotated[PermutationShuffle | BlockShuffle | GridShuffle, Field(discriminator="kind")]

Shuffle = Annotated[
    _ShuffleSection,
    BeforeValidator(_kind_alone, json_schema_input_type=_ShuffleSection | Literal["permutation", "blocks", "grid"]),
]
