"""Defines the section `data.shuffle:`, which puts the training sequences of a source into random order."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ByteSize, Field

from evenpack.config import Section
from evenpack.units import Shards, Tokens

_BLOCK_TOKENS = 1 << 26


class PermutationShuffle(Section):
    """Each epoch computes a permutation of the whole source; the files are not changed.

    Every step reads its sequences from all over the token file, which requires a disk with fast random access, or
    enough memory for the file.
    """

    kind: Literal["permutation"] = "permutation"


class BlockShuffle(Section):
    """Blocks of the corpus, each shuffled within itself only.

    It is for corpora that are in random order already; where adjacent documents are similar, the loss changes abruptly
    from block to block.
    """

    kind: Literal["blocks"]
    block_tokens: Tokens = Field(default=_BLOCK_TOKENS, ge=1)
    """Tokens of a block, as nearly as whole sequences allow."""


class GridShuffle(Section):
    """The sequences are rewritten once in random order, by two passes over a grid of shards.

    Training reads the result block by block, from beginning to end.
    """

    kind: Literal["grid"]
    memory: Annotated[ByteSize, Field(ge=1)] = ByteSize(4 << 30)
    """Memory that the process may use while it shuffles, for example 4GiB; it decides the size of the grid."""
    rows: Shards | None = Field(default=None, ge=1, le=1 << 16)
    """Rows of the grid, which is the number of shards in a column; null: as few as the memory allows."""
    columns: Shards | None = Field(default=None, ge=1, le=1 << 16)
    """Columns of the grid, which is the number of shards in a row; null: as few as the memory allows."""
    block_tokens: Tokens = Field(default=_BLOCK_TOKENS, ge=1)
    """Tokens of a block, as nearly as whole sequences allow."""
    seed: int = Field(default=42, ge=0, lt=1 << 63)
    """Seed of the order in the files; the run's seed decides each epoch's order of blocks and order within blocks."""


def _kind_alone(value: Any) -> Any:
    """Accepts `shuffle: grid` as short for `shuffle: {kind: grid}`."""
    return {"kind": value} if isinstance(value, str) else value


_ShuffleSection = Annotated[PermutationShuffle | BlockShuffle | GridShuffle, Field(discriminator="kind")]

Shuffle = Annotated[
    _ShuffleSection,
    BeforeValidator(_kind_alone, json_schema_input_type=_ShuffleSection | Literal["permutation", "blocks", "grid"]),
]
