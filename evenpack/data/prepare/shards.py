"""One source of HDF5 shards: its finished, masked pairs become the token files of both splits.

The evaluation set goes first, so that each training row can be compared with it, in 8 bytes of memory for each of its
rows. It is recognised by the tokens before masking, whatever the masks.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
from jaxtyping import UInt64

from evenpack.data.manifest import FileRecord, SourceRecord, data_section
from evenpack.data.prepare.pairs import PAIR_COLUMNS, begin_masks, pair_columns, store_view
from evenpack.data.prepare.progress import SourceProgress
from evenpack.data.prepare.splits import SourceInPreparation
from evenpack.data.prepare.tokens_dir import refuse_other_origin
from evenpack.data.recipes import MaskedPairsRecipe
from evenpack.data.sequences import PAIRS, MaskedPairsView, TokenAccounting
from evenpack.data.sequences.pairs import MASK_COLUMNS
from evenpack.data.shards.reading import MaskedSequences, ShardSet, ShardSlice, check_limits, read_slices
from evenpack.data.sources.config import Hdf5Source
from evenpack.data.sources.kinds import held_out
from evenpack.data.sources.without_text import shards_of
from evenpack.data.tokenizers.special_tokens import PairTokens
from evenpack.data.tokens.file import TokenFile
from evenpack.data.tokens.writer import TokenFileWriter
from evenpack.errors import DataError
from evenpack.progress import Progress

_ROWS_AT_ONCE = 2048
_COLUMNS = PAIR_COLUMNS | MASK_COLUMNS


class EvaluationRows:
    """Refuses training rows that are in the evaluation set, or counts them if the source allows it."""

    def __init__(self, view: MaskedPairsView, shards: ShardSet, name: str, source: Hdf5Source) -> None:
        """Reads the identities of a prepared evaluation set, which was made from `shards`."""
        identities = [
            MaskedSequences.of_view(view, first, min(first + _ROWS_AT_ONCE, view.count)).identities()
            for first in range(0, view.count, _ROWS_AT_ONCE)
        ]
        self._identities: UInt64[np.ndarray, " rows"] = np.sort(np.concatenate(identities))
        self._shards = shards
        self._name = name
        self._is_allowed = source.allow_validation_overlap
        self._overlapping = 0
        self._first_place = ""

    def choose(self, part: ShardSlice) -> MaskedSequences:
        """Returns all sequences of the slice.

        Raises: DataError naming the first row of the evaluation set, unless allowed.
        """
        identities = part.sequences.identities()
        found = self._identities[np.searchsorted(self._identities[:-1], identities)] == identities
        (overlapping,) = np.nonzero(found)
        if len(overlapping):
            place = part.place(int(overlapping[0]))
            if not self._is_allowed:
                raise DataError(
                    f"{place}: the evaluation set has the same tokens at {self._place_of(identities[overlapping[0]])}; "
                    "evaluation rows must not be trained on: remove it from one of them, or allow it with "
                    f"data.sources.{self._name}.allow_validation_overlap=true"
                )
            self._first_place = self._first_place or place
            self._overlapping += len(overlapping)
        return part.sequences

    def tell(self, progress: Progress) -> None:
        """Reports once how many rows are in both sets, among those that this call read."""
        if self._overlapping:
            progress.note(
                f"source '{self._name}': {self._overlapping:,} training rows are in the evaluation set too, "
                f"{self._first_place} first, and are trained on (allow_validation_overlap)"
            )

    def _place_of(self, identity: np.uint64) -> str:
        """Returns the position in the evaluation set, found by reading its shards, because it is not stored."""
        for part in read_slices(self._shards):
            (matches,) = np.nonzero(part.sequences.identities() == identity)
            if len(matches):
                return part.place(int(matches[0]))
        raise AssertionError("the set was made from these shards")


Chooser = Callable[[ShardSlice], MaskedSequences]
"""Returns the sequences of a slice that belong to a split."""


@dataclass(frozen=True, kw_only=True)
class ShardPreparation(SourceInPreparation):
    """The preparation of a source of shards."""

    source: Hdf5Source
    pair_tokens: PairTokens | None
    """Special tokens of pairs; None if only the vocabulary's size is known."""

    def run(self) -> tuple[SourceRecord, dict[str, FileRecord]]:
        """Imports the rows, or resumes that.

        Raises: DataError naming file and row of an invalid row (the output is removed), or if an earlier call began
        with other shards or settings; RunError if the disk is full.
        """
        origin = self._origin()
        refuse_other_origin(self.folder / "validation" / PAIRS, origin, self.folder)
        files = shards_of(self.name, self.source)
        training = ShardSet.open(files.training)
        evaluation = ShardSet.open(files.validation) if files.validation else training  # read once for each split then
        total = evaluation.total_bytes + training.total_bytes
        append = partial(self._split, origin=origin, progress=SourceProgress(self.progress, self.name, "shards", total))
        if not files.validation:
            validation = append("validation", training, partial(self._of_split, are_held_out=True), bytes_before=0)
            kept = partial(self._of_split, are_held_out=False)
            train = append("train", training, kept, bytes_before=training.total_bytes)
        else:
            validation = append("validation", evaluation, attrgetter("sequences"), bytes_before=0)
            rows = EvaluationRows(validation, evaluation, self.name, self.source)
            train = append("train", training, rows.choose, bytes_before=evaluation.total_bytes)
            rows.tell(self.progress)
        return self._record(train, validation), self.split_files()

    @property
    def _recipe(self) -> MaskedPairsRecipe:
        assert isinstance(self.config.recipe, MaskedPairsRecipe), "hdf5 sources and masked_pairs go together"
        return self.config.recipe

    def _of_split(self, part: ShardSlice, *, are_held_out: bool) -> MaskedSequences:
        is_held_out = held_out(part.sequences.identities(), self.source, self.config.validation_fraction)
        return part.sequences.select(is_held_out == are_held_out)

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

    def _split(
        self,
        split: str,
        shards: ShardSet,
        choose: Chooser,
        *,
        origin: dict[str, Any],
        progress: SourceProgress,
        bytes_before: int,
    ) -> MaskedPairsView:
        """Returns the stored sequences of one split. `bytes_before` were read for the other one."""
        prefix = self.folder / split / PAIRS
        size = self.vocabulary.vocabulary_size
        with TokenFileWriter.resume(prefix, vocabulary_size=size, columns=_COLUMNS) as writer:
            state = {"origin": origin, "rows": 0, "bytes_read": 0, **writer.state}
            if not writer.complete:
                try:
                    self._append_all(shards, choose, writer, state, progress=progress, bytes_before=bytes_before)
                except DataError:
                    writer.abandon()
                    shutil.rmtree(self.folder)  # the finished split too, whose sources a correction changes as well
                    raise
            writer.finish(state)
        token_file = TokenFile(prefix)
        accounting = TokenAccounting.of_whole(sequences=token_file.documents, tokens=token_file.tokens)
        return store_view(MaskedPairsView, self._recipe, token_file, accounting)

    def _append_all(
        self,
        shards: ShardSet,
        choose: Chooser,
        writer: TokenFileWriter,
        state: dict[str, Any],
        *,
        progress: SourceProgress,
        bytes_before: int,
    ) -> None:
        """Imports the rows that the writer does not have yet, and stores `state` with them."""
        begin_masks(writer, _COLUMNS, state)
        recipe, size, resumed = self._recipe, self.vocabulary.vocabulary_size, state["bytes_read"]
        for part in read_slices(shards, state["rows"]):
            check_limits(part, recipe, vocabulary_size=size, pair_tokens=self.pair_tokens)
            pairs = choose(part)
            columns = pair_columns(pairs.first_segment_lengths, pairs.next_sentence_labels, pairs.masks, state)
            writer.append(pairs.tokens, pairs.lengths, columns)
            state |= {"rows": part.rows_read, "bytes_read": part.bytes_read}
            if writer.is_commit_due:
                writer.commit(state)
            progress.report(
                documents=writer.documents,
                tokens=writer.tokens,
                bytes_read=bytes_before + part.bytes_read,
                bytes_resumed=bytes_before + resumed,
            )

    def _record(self, train: MaskedPairsView, validation: MaskedPairsView) -> SourceRecord:
        """Packs both splits. Raises: DataError if there is nothing to train on."""
        if not train.count:
            raise DataError(
                f"source '{self.name}' leaves no sequence to train on: all {validation.count} are held out; lower "
                "data.validation_fraction"
            )
        return SourceRecord(
            kind="hdf5",
            inputs=self.inputs,
            token_file=(self.folder / "train" / PAIRS).relative_to(self.directory).as_posix(),
            documents=train.count + validation.count,
            tokens=train.accounting.tokens_read + validation.accounting.tokens_read,
            text_bytes=0,
            unknown_tokens=0,
            train=self.store_split("train", train),
            validation=self.store_split("validation", validation),
        )
