"""The common part of all sources' splits: training sequences in random order, a plan, and files with checksums."""

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from evenpack.data.config import DataConfig
from evenpack.data.manifest import SPLITS, FileRecord, PackingSummary, SplitRecord, TokenizerRecord, data_section
from evenpack.data.order.blocked_plan import store_blocks
from evenpack.data.order.stored_plan import packed, remove_plan, store_plan
from evenpack.data.permutation import derive_key
from evenpack.data.prepare.progress import Progress, SourceReporter
from evenpack.data.sequences import PAIRS, SequenceView, length_chunks
from evenpack.data.sequences.shuffled import SHUFFLED, SOURCE_IDS, OrderedView, ShuffledView
from evenpack.data.shuffle.config import GridShuffle, PermutationShuffle
from evenpack.data.shuffle.grid import Grid, choose_grid, equal_parts
from evenpack.data.shuffle.shuffle import GridShuffler, remove_shuffle
from evenpack.data.sources.files import InputFile
from evenpack.data.tokens.file import TokenFile, bin_path, index_path
from evenpack.data.tokens.writer import column_path, journal_path, read_journal


@dataclass(frozen=True, kw_only=True)
class SourceInPreparation:
    """What the preparation of a source of any kind needs."""

    name: str
    config: DataConfig
    directory: Path
    """Folder of the whole prepared set."""
    inputs: tuple[InputFile, ...]
    """Input files as they were before anything was read."""
    vocabulary: TokenizerRecord
    progress: Progress

    @property
    def folder(self) -> Path:
        """The folder of the source within the prepared directory."""
        return self.directory / "sources" / self.name


def store_split(folder: Path, view: SequenceView, config: DataConfig, *, split: str) -> SplitRecord:
    """Packs the sequences of a split and stores the plan, in blocks if training reads it in blocks.

    Raises: PackingError if they cannot be packed so.
    """
    remove_plan(folder)  # of another order, that an interrupted call may have stored here
    if view.count == 0:
        return SplitRecord(accounting=view.accounting, packing=None)
    if split == "train" and not isinstance(config.shuffle, PermutationShuffle):
        tokens = view.accounting.tokens_kept
        parts = max(1, round(tokens / config.shuffle.block_tokens))
        bounds = sorted(set(equal_parts(length_chunks(view), total=tokens, parts=parts)))
        packing = store_blocks(
            folder, view, bounds, partial(packed, config=config.packing, pack_length=config.pack_length)
        )
    else:
        packing = store_plan(folder, view, config.packing, pack_length=config.pack_length)
    padding = view.accounting.padding_slots
    return SplitRecord(accounting=view.accounting, packing=PackingSummary.of(packing, padding_in_sequences=padding))


def split_files(source_folder: Path, directory: Path) -> dict[str, FileRecord]:
    """Returns every file of both splits by its name within the prepared directory; journals are not part of the set."""
    files = {}
    for folder in (source_folder / split for split in SPLITS):
        pairs = read_journal(folder / PAIRS)
        for path in sorted(folder.iterdir()):
            if path != journal_path(folder / PAIRS):
                name = path.relative_to(directory).as_posix()
                files[name] = FileRecord.of(path, name, None if pairs is None else pairs.checksums.get(path.name))
    return files


def in_training_order(
    view: SequenceView,
    folder: Path,
    config: DataConfig,
    *,
    vocabulary: TokenizerRecord,
    tokens_checksum: str,
    progress: Progress,
) -> SequenceView:
    """Returns the sequences of the view as a grid shuffle writes them to `folder`, the folder of the source.

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
    reporter = SourceReporter(progress, folder.name, "shuffle", 2 * token_bytes)

    def report_progress(sequences: int, bytes_read: int) -> None:
        tokens_written = sequences * tokens // view.count
        reporter.report(documents=sequences, tokens=tokens_written, bytes_read=bytes_read, bytes_resumed=0)

    GridShuffler(
        view=view,
        grid=grid,
        folder=folder,
        vocabulary_size=vocabulary.vocabulary_size,
        origin=_shuffle_origin(config, tokens_checksum, grid),
        report_progress=report_progress,
    ).run()
    return ShuffledView(view, TokenFile(folder / SHUFFLED))


def shuffled_files(folder: Path, directory: Path) -> dict[str, FileRecord]:
    """Returns the files of a shuffle by their names within the prepared directory; none where there was no shuffle."""
    journal = read_journal(folder / SHUFFLED)
    if journal is None:
        return {}
    prefix = folder / SHUFFLED
    paths = (bin_path(prefix), index_path(prefix), column_path(prefix, SOURCE_IDS))
    names = [path.relative_to(directory).as_posix() for path in paths]
    return {
        name: FileRecord.of(path, name, journal.checksums[path.name]) for name, path in zip(names, paths, strict=True)
    }


def _shuffle_origin(config: DataConfig, tokens_checksum: str, grid: Grid) -> dict[str, Any]:
    """Returns everything that decides the sequences and their order."""
    section = data_section(config)
    return {
        "tokens": tokens_checksum,
        "recipe": section["recipe"],
        "validation_fraction": section["validation_fraction"],
        "grid": asdict(grid),
    }
