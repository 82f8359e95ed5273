"""Rewrites the training sequences of a source in random order if `data.shuffle` is `grid`."""

import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import xxhash

from evenpack.data.checksums import Checksums
from evenpack.data.config import DataConfig
from evenpack.data.order.permutation import derive_key
from evenpack.data.prepare.manifest import FileRecord, TokenizerRecord, data_section
from evenpack.data.prepare.progress import PrepareState, Progress
from evenpack.data.sequences import SequenceView
from evenpack.data.sequences.shuffled import SHUFFLED, SOURCE_IDS, OrderedView, ShuffledView
from evenpack.data.shuffle.config import GridShuffle
from evenpack.data.shuffle.grid import Grid, choose_grid
from evenpack.data.shuffle.shuffle import GridShuffler, remove_shuffle
from evenpack.data.tokens.file import TokenFile, column_path, read_journal
from evenpack.data.tokens.index import bin_path, index_path


def in_training_order(
    view: SequenceView,
    folder: Path,
    config: DataConfig,
    *,
    vocabulary: TokenizerRecord,
    tokens_checksum: str,
    progress: Progress,
) -> SequenceView:
    """Returns the sequences of the view as a grid shuffle writes them to `folder`, that of the source.

    Without a grid shuffle it returns the view itself, and removes the files of an earlier one.

    Args:
        tokens_checksum: checksum of the documents' tokens, which identifies the token file.

    Raises: DataError if the grid cannot keep its memory limit, or if files of an earlier call are damaged; RunError if
    the disk is full.
    """
    if not isinstance(config.shuffle, GridShuffle) or view.count == 0:
        remove_shuffle(folder)
        return view
    assert isinstance(view, OrderedView), "the configuration takes no other recipes"
    tokens = view.accounting.tokens_kept
    token_bytes = tokens * view.token_file.dtype.itemsize
    grid = choose_grid(
        token_bytes=token_bytes,
        sequences=view.count,
        memory=config.shuffle.memory,
        seed=int(derive_key(config.shuffle.seed, xxhash.xxh3_64_intdigest(folder.name.encode()))),
        rows=config.shuffle.rows,
        columns=config.shuffle.columns,
    )
    progress.note(f"source '{folder.name}': shuffling in a grid of {grid.rows} rows and {grid.columns} columns")
    started = time.monotonic()

    def report_progress(sequences: int, bytes_read: int) -> None:
        progress.update(
            PrepareState(
                stage="shuffle",
                source=folder.name,
                documents=sequences,
                tokens=sequences * tokens // view.count,
                bytes_read=bytes_read,
                bytes_resumed=0,
                total_bytes=2 * token_bytes,
                elapsed_seconds=time.monotonic() - started,
            )
        )

    GridShuffler(
        view=view,
        grid=grid,
        folder=folder,
        vocabulary_size=vocabulary.vocabulary_size,
        origin=_origin(config, tokens_checksum, grid),
        report_progress=report_progress,
    ).run()
    return ShuffledView(view, TokenFile(folder / SHUFFLED))


def shuffled_files(folder: Path, directory: Path) -> dict[str, FileRecord]:
    """Returns the files of a shuffle by their names within the prepared directory; none where there was no shuffle."""
    journal = read_journal(folder / SHUFFLED)
    if journal is None:
        return {}
    checksums: Mapping[str, Checksums] = journal.checksums
    prefix = folder / SHUFFLED
    paths = (bin_path(prefix), index_path(prefix), column_path(prefix, SOURCE_IDS))
    names = [path.relative_to(directory).as_posix() for path in paths]
    return {name: FileRecord.of(path, name, checksums[path.name]) for name, path in zip(names, paths, strict=True)}


def _origin(config: DataConfig, tokens_checksum: str, grid: Grid) -> dict[str, Any]:
    """Returns everything that decides the sequences and their order."""
    section = data_section(config)
    return {
        "tokens": tokens_checksum,
        "recipe": section["recipe"],
        "validation_fraction": section["validation_fraction"],
        "grid": asdict(grid),
    }
