"""The common part of all sources' splits: a plan, and files with checksums."""

from pathlib import Path

from evenpack.data.config import DataConfig
from evenpack.data.order.blocks import store_blocks
from evenpack.data.order.stored_plan import packed, remove_plan, store_plan
from evenpack.data.packing import LengthHistogram, Packing
from evenpack.data.prepare.manifest import SPLITS, FileRecord, PackingSummary, SplitRecord
from evenpack.data.sequences import PAIRS, SequenceView, length_chunks
from evenpack.data.shuffle.config import PermutationShuffle
from evenpack.data.shuffle.grid import equal_parts
from evenpack.data.tokens.file import read_journal
from evenpack.data.tokens.journal import journal_path


def store_split(folder: Path, view: SequenceView, config: DataConfig, *, split: str) -> SplitRecord:
    """Packs the sequences of a split and stores the plan, in blocks if training reads it in blocks.

    Raises: PackingError if they cannot be packed so.
    """
    remove_plan(folder)  # of another order, that an interrupted call may have stored here
    if view.count == 0:
        return SplitRecord(accounting=view.accounting, packing=None)
    if split == "train" and not isinstance(config.shuffle, PermutationShuffle):
        packing = _store_blocks(folder, view, config, block_tokens=config.shuffle.block_tokens)
    else:
        packing = store_plan(folder, view, config.packing, pack_length=config.pack_length)
    padding = view.accounting.padding_slots
    return SplitRecord(accounting=view.accounting, packing=PackingSummary.of(packing, padding_in_sequences=padding))


def _store_blocks(folder: Path, view: SequenceView, config: DataConfig, *, block_tokens: int) -> Packing:
    def packer(histogram: LengthHistogram) -> Packing:
        return packed(histogram, config.packing, pack_length=config.pack_length)

    tokens = view.accounting.tokens_kept
    bounds = equal_parts(length_chunks(view), total=tokens, parts=max(1, round(tokens / block_tokens)))
    return store_blocks(folder, view, sorted(set(bounds)), packer)


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
