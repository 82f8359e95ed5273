"""Prepares one source: its token file, its splits, and their accounting."""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from jaxtyping import Int64

from evenpack.data.config import ConcatRecipe, DataConfig, DocumentsRecipe, PaddingRecipe, SentencePairsRecipe
from evenpack.data.prepare.changed_inputs import refuse_changes_meanwhile
from evenpack.data.prepare.manifest import (
    SPLITS,
    FileRecord,
    SourceRecord,
    TokenizerRecord,
    refuse_changed_inputs,
    refuse_differences,
)
from evenpack.data.prepare.origins import Origin, input_files, tokens_origin
from evenpack.data.prepare.pairs import PairSettings, write_pairs
from evenpack.data.prepare.progress import Progress, SourceReporter
from evenpack.data.prepare.shared_tokens import SharedTokens, recorded_path
from evenpack.data.prepare.shuffling import in_training_order, shuffled_files
from evenpack.data.prepare.splits import split_files, store_split
from evenpack.data.prepare.tokenising.encoding import columns
from evenpack.data.prepare.tokenising.write import Tokenising, remove_unfinished, write_tokens
from evenpack.data.prepare.tokenising.written_tokens import WrittenTokens
from evenpack.data.prepare.validation_documents import check_overlap
from evenpack.data.sequences import PAIRS, SequenceView, build_view, open_view
from evenpack.data.sequences.mask_drawing import MaskDrawing
from evenpack.data.sequences.sentences import SentenceIndex
from evenpack.data.sources.config import HubSource, MegatronSource, SourceOfFiles
from evenpack.data.sources.corpus import Corpus
from evenpack.data.sources.held_out import held_out, names_validation_documents
from evenpack.data.sources.input_files import InputFile
from evenpack.data.sources.megatron import check_ends, megatron_prefix
from evenpack.data.tokenizers.tokenizer import Tokenizer
from evenpack.data.tokens.array_file import write_array
from evenpack.data.tokens.file import (
    TokenFile,
    hash_documents,
    hashes_path,
    read_journal,
)
from evenpack.data.tokens.index import bin_path, index_path
from evenpack.errors import DataError
from evenpack.files import file_checksum

ViewMaker = Callable[[str, TokenFile, Int64[np.ndarray, " documents"]], SequenceView]
"""Makes the sequences of documents, stored in the split's folder, from split, token file and documents."""


@dataclass(frozen=True, kw_only=True)
class SourcePreparation:
    """Everything that is needed to prepare one source."""

    name: str
    config: DataConfig
    directory: Path
    """Folder of the whole prepared set."""
    inputs: tuple[InputFile, ...]
    """Input files as they were before anything was read."""
    vocabulary: TokenizerRecord
    progress: Progress
    shared: SharedTokens | None
    """Shared tokens; None: the tokens of text are in the prepared directory."""

    @property
    def folder(self) -> Path:
        return self.directory / "sources" / self.name

    def from_text(
        self, corpus: Corpus, tokenising: Tokenising, reporter: SourceReporter
    ) -> tuple[SourceRecord, dict[str, FileRecord]]:
        """Tokenises the corpus, or resumes that.

        Raises: DataError if the source is invalid or changes meanwhile (its output is removed), or if an earlier call
        began with another source or tokenizer. RunError if the disk is full.
        """
        origin, language = self._origin(), tokenising.language
        with self._tokens_folder(origin) as folder:
            prefix = folder / "tokens"
            self._refuse_other_origin(prefix, origin)
            try:
                journal = write_tokens(
                    corpus,
                    prefix,
                    tokenising,
                    origin=origin,
                    reporter=reporter,
                    check_inputs=partial(
                        refuse_changes_meanwhile, self.name, self.config.sources[self.name], self.inputs
                    ),
                )
            except DataError:
                self._remove_if_empty()
                raise
        written = WrittenTokens.of_text(prefix, journal, columns(language))
        self._check_overlap(corpus, written)
        return self._finish(
            written,
            self._documents_view if language is None else partial(self._pairs_view, tokenising.tokenizer, reporter),
        )

    def from_token_file(self, source: MegatronSource) -> tuple[SourceRecord, dict[str, FileRecord]]:
        """Uses a token file in its original location: checks its vocabulary and its ends, and hashes its documents.

        Raises: DataError if it is broken, empty, or not of the vocabulary.
        """
        prefix = megatron_prefix(self.name, source)
        token_file = TokenFile(prefix)
        if token_file.tokens == 0:
            raise DataError(f"source '{self.name}': token file {prefix} holds no token")
        token_file.check_vocabulary(self.vocabulary.vocabulary_size)
        if source.require_end_of_text:
            check_ends(self.name, token_file, end_of_text=self.vocabulary.end_of_text_id)
        self.folder.mkdir(parents=True, exist_ok=True)
        hashes = hashes_path(self.folder / "tokens")
        write_array(hashes, hash_documents(token_file))
        return self._finish(WrittenTokens.of_token_file(token_file, hashes), self._documents_view)

    def _origin(self) -> Origin:
        return tokens_origin(self.config, self.name, self.inputs, tokenizer_checksum=self.vocabulary.checksum)

    @contextmanager
    def _tokens_folder(self, origin: Origin) -> Iterator[Path]:
        """Returns the folder for the token file; files of an earlier call in the prepared directory stay there."""
        if self.shared is None or read_journal(self.folder / "tokens") is not None:
            yield self.folder
            return
        remove_unfinished(self.folder / "tokens")
        with self.shared.held(self.name, origin) as folder:
            yield folder

    def _check_overlap(self, corpus: Corpus, written: WrittenTokens) -> None:
        """Raises: DataError if training documents are named for validation too; unshared tokens are removed then."""
        source = self.config.sources[self.name]
        if not names_validation_documents(source):
            return
        assert isinstance(source, SourceOfFiles | HubSource), "no other kind names documents"
        try:
            check_overlap(self.name, source, written.identities, corpus, self.progress)
        except DataError:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def _refuse_other_origin(self, prefix: Path, origin: Origin) -> None:
        journal = read_journal(prefix)
        if journal is None or not journal.state:
            return
        begun = journal.state["origin"]
        refuse_differences(begun["data"], origin["data"], self.folder)
        refuse_changed_inputs(input_files(begun), self.inputs, self.folder)

    def _finish(self, written: WrittenTokens, make_view: ViewMaker) -> tuple[SourceRecord, dict[str, FileRecord]]:
        """Makes splits, sequences and strategies, and then the accounting."""
        source = self.config.sources[self.name]
        is_held_out = held_out(np.asarray(written.identities), source, self.config.validation_fraction)
        splits = {}
        for split, chosen in zip(SPLITS, (~is_held_out, is_held_out), strict=True):
            view = make_view(split, written.token_file, np.flatnonzero(chosen))
            if split == "train":
                view = self._in_training_order(view, written)
            splits[split] = store_split(self.folder / split, view, self.config, split=split)
        if splits["train"].packing is None:
            accounting = splits["train"].accounting
            raise DataError(
                f"source '{self.name}' leaves no sequence to train on: of {written.token_file.documents} documents "
                f"{int(is_held_out.sum())} are held out for validation, {accounting.documents_too_short} are shorter "
                f"than minimum_document_length or empty, {accounting.documents_too_long} longer than "
                f"max_sequence_length and {accounting.documents_single_sentence} of a single sentence; change "
                "data.recipe or data.validation_fraction, or give it more documents"
            )
        record = SourceRecord(
            kind=source.kind,
            inputs=self.inputs,
            token_file=recorded_path(written.token_file.prefix, self.directory, self.shared),
            documents=written.token_file.documents,
            tokens=written.token_file.tokens,
            text_bytes=written.text_bytes,
            unknown_tokens=written.unknown_tokens,
            rows=written.rows,
            train=splits["train"],
            validation=splits["validation"],
        )
        return record, self._files(written)

    def _in_training_order(self, view: SequenceView, written: WrittenTokens) -> SequenceView:
        tokens = written.checksums.get(bin_path(written.token_file.prefix).name)
        return in_training_order(
            view,
            self.folder,
            self.config,
            vocabulary=self.vocabulary,
            # If the source holds tokens, the hashes are of the tokens.
            tokens_checksum=file_checksum(written.columns[0]) if tokens is None else tokens.whole,
            progress=self.progress,
        )

    def _documents_view(
        self, split: str, token_file: TokenFile, documents: Int64[np.ndarray, " documents"]
    ) -> SequenceView:
        """Makes the view of documents, which is quick and repeated after an interruption."""
        folder, recipe = self.folder / split, self.config.recipe
        assert isinstance(recipe, DocumentsRecipe | ConcatRecipe | PaddingRecipe), "pairs have a maker of their own"
        if folder.exists():
            shutil.rmtree(folder)  # an interrupted call may have had another recipe
        build_view(recipe, token_file, documents).save(folder)
        return open_view(folder, token_file)  # mapped, so that documents take no memory from here on

    def _pairs_view(
        self,
        tokenizer: Tokenizer,
        reporter: SourceReporter,
        split: str,
        token_file: TokenFile,
        documents: Int64[np.ndarray, " documents"],
    ) -> SequenceView:
        """Makes the view of pairs, resumed after an interruption, unless that call had another recipe."""
        folder, recipe = self.folder / split, self.config.recipe
        assert isinstance(recipe, SentencePairsRecipe), "documents have a maker of their own"
        passes = recipe.duplication_factor if split == "train" else 1
        settings = PairSettings(
            recipe=recipe,
            passes=passes,
            pair_tokens=tokenizer.pair_tokens,
            vocabulary_size=self.vocabulary.vocabulary_size,
            masks=self._mask_drawing(recipe, tokenizer),
        )
        origin = {
            "tokens": self._origin(),
            "recipe": recipe.model_dump(exclude_none=True),
            "validation_fraction": self.config.validation_fraction,
        }
        self._clear_unless_begun(folder, origin)
        _, lengths = token_file.spans(documents)
        text_bytes = passes * int((lengths - 1).sum()) * token_file.dtype.itemsize
        view = write_pairs(
            SentenceIndex.open(token_file),
            documents,
            settings,
            folder,
            origin=origin,
            reporter=replace(reporter, stage="pairs", total_bytes=text_bytes, start_seconds=time.monotonic()),
        )
        view.save(folder)
        return view

    def _mask_drawing(self, recipe: SentencePairsRecipe, tokenizer: Tokenizer) -> MaskDrawing | None:
        if recipe.static_masks is None:
            return None
        return MaskDrawing(
            config=recipe.static_masks,
            vocabulary=tokenizer.masking_vocabulary(),
            seed=recipe.seed,
            source_key=xxhash.xxh3_64_intdigest(self.name.encode()),
        )

    def _clear_unless_begun(self, folder: Path, origin: dict[str, Any]) -> None:
        journal = read_journal(folder / PAIRS)
        if folder.exists() and (journal is None or journal.state.get("origin") != origin):
            shutil.rmtree(folder)

    def _files(self, written: WrittenTokens) -> dict[str, FileRecord]:
        """Returns every file by a name that does not depend on its location."""
        prefix = written.token_file.prefix
        paths = {f"tokens{path.suffix}": path for path in (bin_path(prefix), index_path(prefix))}
        paths |= {path.name: path for path in written.columns}
        files = {}
        for name, path in paths.items():
            recorded = recorded_path(path, self.directory, self.shared)
            files[f"sources/{self.name}/{name}"] = FileRecord.of(path, recorded, written.checksums.get(path.name))
        return files | shuffled_files(self.folder, self.directory) | split_files(self.folder, self.directory)

    def _remove_if_empty(self) -> None:
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()
