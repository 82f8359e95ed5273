"""One source of HDF5 shards: its finished, masked pairs become the token files of both splits.

The evaluation set goes first, so that each training row can be compared with it, in 8 bytes of memory for each of its
rows.
"""

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool

from evenpack.data.config import DataConfig, MaskedPairsRecipe
from evenpack.data.prepare.evaluation_rows import EvaluationRows
from evenpack.data.prepare.manifest import (
    FileRecord,
    SourceRecord,
    TokenizerRecord,
    data_section,
    refuse_changed_inputs,
    refuse_differences,
)
from evenpack.data.prepare.pair_columns import PAIR_COLUMNS, begin_masks, open_pairs
from evenpack.data.prepare.progress import Progress, SourceReporter
from evenpack.data.prepare.splits import split_files, store_split
from evenpack.data.sequences import PAIRS, MaskedPairsView, TokenAccounting
from evenpack.data.sequences.static_masks import MASK_COLUMNS
from evenpack.data.shards.checks import RowLimits, check_limits
from evenpack.data.shards.layout import ShardSet
from evenpack.data.shards.masked_sequences import MaskedSequences
from evenpack.data.shards.reading import ShardSlice, read_slices
from evenpack.data.sources.config import Hdf5Source
from evenpack.data.sources.hdf5 import bytes_to_read, training_files, validation_files
from evenpack.data.sources.held_out import held_out
from evenpack.data.sources.input_files import InputFile
from evenpack.data.tokenizers.tokenizer import PairTokens
from evenpack.data.tokens.file import TokenFile, read_journal
from evenpack.data.tokens.writer import TokenFileWriter
from evenpack.errors import DataError

COMMIT_SECONDS = 5.0
"""Seconds between commits, which is the most work that a kill can lose."""

_COLUMNS = PAIR_COLUMNS | MASK_COLUMNS

Chooser = Callable[[ShardSlice], Bool[np.ndarray, " K"]]
"""Selects the sequences of a slice that belong to a split."""


@dataclass(frozen=True, kw_only=True)
class ShardPreparation:
    """Everything that is needed to prepare one source of shards."""

    name: str
    source: Hdf5Source
    config: DataConfig
    directory: Path
    """Folder of the whole prepared set."""
    inputs: tuple[InputFile, ...]
    """Input files as they were before anything was read."""
    vocabulary: TokenizerRecord
    pair_tokens: PairTokens | None
    """Special tokens of pairs; None if only the vocabulary's size is known."""
    progress: Progress

    @property
    def folder(self) -> Path:
        return self.directory / "sources" / self.name

    def run(self) -> tuple[SourceRecord, dict[str, FileRecord]]:
        """Imports the rows, or resumes that.

        Raises: DataError naming file and row of an invalid row (the output is removed), or if an earlier call began
        with other shards or settings; RunError if the disk is full.
        """
        origin = self._origin()
        self._refuse_other_origin(origin)
        training = ShardSet.open(training_files(self.name, self.source))
        evaluation = self._evaluation_set()
        if evaluation is None:
            views = {
                "validation": self._split("validation", training, self._is_held_out, origin, bytes_before=0),
                "train": self._split(
                    "train",
                    training,
                    lambda part: ~self._is_held_out(part),
                    origin,
                    bytes_before=training.total_bytes,
                ),
            }
        else:
            views = {"validation": self._split("validation", evaluation, _every_row, origin, bytes_before=0)}
            rows = EvaluationRows.of(views["validation"], evaluation, self.name, self.source)
            views["train"] = self._split("train", training, rows.choose, origin, bytes_before=evaluation.total_bytes)
            rows.tell(self.progress)
        return self._record(views), split_files(self.folder, self.directory)

    @property
    def _limits(self) -> RowLimits:
        return RowLimits(
            max_sequence_length=self._recipe.max_sequence_length,
            max_predictions=self._recipe.max_predictions,
            vocabulary_size=self.vocabulary.vocabulary_size,
            pair_tokens=self.pair_tokens,
        )

    @property
    def _recipe(self) -> MaskedPairsRecipe:
        assert isinstance(self.config.recipe, MaskedPairsRecipe), "hdf5 sources and masked_pairs go together"
        return self.config.recipe

    def _evaluation_set(self) -> ShardSet | None:
        files = validation_files(self.name, self.source)
        return ShardSet.open(files) if files else None

    def _is_held_out(self, part: ShardSlice) -> Bool[np.ndarray, " K"]:
        return held_out(part.sequences.identities(), self.source, self.config.validation_fraction)

    def _origin(self) -> dict[str, Any]:
        """Returns everything that decides the token files; their journals store it."""
        section = data_section(self.config)
        return {
            "data": {
                "sources": {self.name: section["sources"][self.name]},
                "tokenizer": {"checksum": self.vocabulary.checksum},
                "recipe": section["recipe"],
                "validation_fraction": section["validation_fraction"],
            },
            "inputs": [file.model_dump() for file in self.inputs],
        }

    def _refuse_other_origin(self, origin: dict[str, Any]) -> None:
        journal = read_journal(self.folder / "validation" / PAIRS)
        if journal is None or not journal.state:
            return
        begun = journal.state["origin"]
        refuse_differences(begun["data"], origin["data"], self.folder)
        refuse_changed_inputs([InputFile(**file) for file in begun["inputs"]], self.inputs, self.folder)

    def _split(
        self, split: str, shards: ShardSet, choose: Chooser, origin: dict[str, Any], *, bytes_before: int
    ) -> MaskedPairsView:
        """Returns the stored sequences of one split. `bytes_before` were read for the other one."""
        prefix = self.folder / split / PAIRS
        size = self.vocabulary.vocabulary_size
        with TokenFileWriter.resume(prefix, vocabulary_size=size, columns=_COLUMNS) as writer:
            if not writer.complete:
                state = {"origin": origin, "rows": 0, "bytes_read": 0, **writer.state}
                reporter = self._reporter(bytes_before)
                try:
                    self._append_all(shards, choose, writer, state, reporter=reporter, bytes_before=bytes_before)
                except DataError:
                    writer.abandon()
                    shutil.rmtree(self.folder)  # the finished split too, whose sources a correction changes as well
                    raise
                writer.finish(state)
            else:
                writer.finish()
        token_file = TokenFile(prefix)
        view = open_pairs(MaskedPairsView, self._recipe, token_file, _accounting(token_file))
        view.save(prefix.parent)
        return view

    def _append_all(
        self,
        shards: ShardSet,
        choose: Chooser,
        writer: TokenFileWriter,
        state: dict[str, Any],
        *,
        reporter: SourceReporter,
        bytes_before: int,
    ) -> None:
        """Imports the rows that the writer does not have yet, and stores `state` with them."""
        begin_masks(writer, _COLUMNS, state)
        limits, committed, resumed = self._limits, time.monotonic(), state["bytes_read"]
        for part in read_slices(shards, state["rows"]):
            check_limits(part.sequences, limits, part.place)
            _append(part.sequences.select(choose(part)), writer, state)
            state |= {"rows": part.rows_read, "bytes_read": part.bytes_read}
            if time.monotonic() - committed >= COMMIT_SECONDS:
                writer.commit(state)
                committed = time.monotonic()
            reporter.report(
                documents=writer.documents,
                tokens=writer.tokens,
                bytes_read=bytes_before + part.bytes_read,
                bytes_resumed=bytes_before + resumed,
            )

    def _reporter(self, bytes_before: int) -> SourceReporter:
        return SourceReporter(
            progress=self.progress,
            source=self.name,
            stage="shards",
            total_bytes=bytes_to_read(self.name, self.source),
            start_seconds=time.monotonic(),
        )

    def _record(self, views: dict[str, MaskedPairsView]) -> SourceRecord:
        """Packs both splits. Raises: DataError if there is nothing to train on."""
        if not views["train"].count:
            raise DataError(
                f"source '{self.name}' leaves no sequence to train on: all {views['validation'].count} are held out; "
                "lower data.validation_fraction"
            )
        return SourceRecord(
            kind="hdf5",
            inputs=self.inputs,
            token_file=(self.folder / "train" / PAIRS).relative_to(self.directory).as_posix(),
            documents=sum(view.count for view in views.values()),
            tokens=sum(view.accounting.tokens_read for view in views.values()),
            text_bytes=0,
            unknown_tokens=0,
            train=store_split(self.folder / "train", views["train"], self.config, split="train"),
            validation=store_split(self.folder / "validation", views["validation"], self.config, split="validation"),
        )


def _every_row(part: ShardSlice) -> Bool[np.ndarray, " K"]:
    return np.ones(len(part.sequences.lengths), dtype=np.bool_)


def _append(sequences: MaskedSequences, writer: TokenFileWriter, state: dict[str, Any]) -> None:
    """Appends sequences; `state` counts the masks."""
    columns = {
        "first_segment_lengths": sequences.first_segment_lengths.astype(np.uint16),
        "next_sentence_labels": sequences.next_sentence_labels.astype(np.uint8),
        "mask_offsets": state["masks"] + np.cumsum(sequences.mask_counts),
        "mask_positions": sequences.mask_places.astype(np.uint16),
        "mask_labels": sequences.mask_labels.astype(np.int32),
    }
    writer.append(sequences.tokens, sequences.lengths, columns)
    state["masks"] += len(sequences.mask_labels)


def _accounting(token_file: TokenFile) -> TokenAccounting:
    """Returns the accounting, in which each row is a whole sequence."""
    return TokenAccounting(
        documents_read=token_file.documents,
        documents_kept=token_file.documents,
        documents_too_short=0,
        documents_too_long=0,
        tokens_read=token_file.tokens,
        tokens_kept=token_file.tokens,
        tokens_cut=0,
        tokens_too_short=0,
        tokens_too_long=0,
        sequences=token_file.documents,
    )
