"""The second pass: each row of the grid is loaded, permuted and appended to a token file of its sequences."""

import numpy as np

from evenpack.data.sequences.shuffled import SOURCE_IDS
from evenpack.data.shuffle.columns import Column, ColumnFolder
from evenpack.data.shuffle.grid import Grid
from evenpack.data.shuffle.sequences import Sequences, add_contents
from evenpack.data.tokens.file import TokenFileWriter


def append_row(writer: TokenFileWriter, folder: ColumnFolder, columns: tuple[Column, ...], grid: Grid, row: int) -> int:
    """Appends row `row` of the grid. Returns: the content hash of its sequences, as they were given to the writer.

    Raises: DataError if a shard is not as it was written; RunError if the disk is full.
    """
    sequences = _load(folder, columns, row)
    content = 0
    for chunk in sequences.in_order(grid.row_order(row, len(sequences.lengths))):
        content = add_contents(content, chunk.content())
        writer.append(chunk.tokens, chunk.lengths, {SOURCE_IDS: chunk.ids})
    return content


def _load(folder: ColumnFolder, columns: tuple[Column, ...], row: int) -> Sequences:
    """Loads shard `row` of every column, one after the other."""
    shards = [column.shards[row] for column in columns]
    row_sequences = Sequences(
        tokens=folder.buffer.take(sum(shard.tokens for shard in shards)),
        lengths=np.empty(sum(shard.sequences for shard in shards), dtype=np.int32),
        ids=np.empty(sum(shard.sequences for shard in shards), dtype=folder.id_type),
    )
    sequence = token = 0
    for index, (column, shard) in enumerate(zip(columns, shards, strict=True)):
        part = Sequences(
            tokens=row_sequences.tokens[token : token + shard.tokens],
            lengths=row_sequences.lengths[sequence : sequence + shard.sequences],
            ids=row_sequences.ids[sequence : sequence + shard.sequences],
        )
        folder.load_shard(index, column, row, into=part)
        sequence, token = sequence + shard.sequences, token + shard.tokens
    return row_sequences
