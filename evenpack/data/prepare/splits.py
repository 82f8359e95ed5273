"""The common part of all sources' preparation: the plan of each split, and its files with their checksums."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from evenpack.data.config import DataConfig
from evenpack.data.manifest import SPLITS, FileRecord, PackingSummary, SplitRecord, TokenizerRecord
from evenpack.data.order.blocked_plan import store_blocks
from evenpack.data.order.stored_plan import packed, remove_plan, store_plan
from evenpack.data.prepared import Split
from evenpack.data.sequences import PAIRS, SequenceView, length_chunks
from evenpack.data.shuffle.config import PermutationShuffle
from evenpack.data.shuffle.grid import equal_parts
from evenpack.data.sources.files import InputFile
from evenpack.data.tokens.writer import journal_path, read_journal
from evenpack.progress import Progress


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

    def store_split(self, split: Split, view: SequenceView) -> SplitRecord:
        """Packs the sequences of a split and stores the plan, in blocks if training reads it in blocks.

        Raises: PackingError if they cannot be packed so.
        """
        folder, config = self.folder / split, self.config
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

    def split_files(self) -> dict[str, FileRecord]:
        """Returns every file of both splits by its name within the prepared directory, without their journals."""
        files = {}
        for folder in (self.folder / split for split in SPLITS):
            pairs = read_journal(folder / PAIRS)
            for path in sorted(folder.iterdir()):
                if path != journal_path(folder / PAIRS):
                    name = path.relative_to(self.directory).as_posix()
                    files[name] = FileRecord.of(path, name, None if pairs is None else pairs.checksums.get(path.name))
        return files
