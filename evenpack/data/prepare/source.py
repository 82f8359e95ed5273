"""Prepares one source: its token file, its splits, and their accounting."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from jaxtyping import Int64, UInt64

from evenpack.data.config import DataConfig
from evenpack.data.manifest import (
    SPLITS,
    FileRecord,
    SourceRecord,
)
from evenpack.data.prepare.pairs import PairSettings, write_pairs
from evenpack.data.prepare.progress import Progress, SourceReporter
from evenpack.data.prepare.splits import (
    SourceInPreparation,
    in_training_order,
    shuffled_files,
    split_files,
    store_split,
)
from evenpack.data.prepare.tokenising import columns
from evenpack.data.prepare.tokens import Tokenising, WrittenTokens, remove_unfinished, write_tokens
from evenpack.data.prepare.tokens_dir import (
    Origin,
    SharedTokens,
    recorded_path,
    refuse_other_origin,
    tokens_origin,
)
from evenpack.data.prepare.verification import refuse_changes_meanwhile
from evenpack.data.recipes import ConcatRecipe, DocumentsRecipe, PaddingRecipe, SentencePairsRecipe
from evenpack.data.sequences import PAIRS, SequenceView, build_view
from evenpack.data.sequences.pair_drawing import MaskDrawing, SentenceIndex
from evenpack.data.sources.config import HubSource, MegatronSource, SourceOfFiles
from evenpack.data.sources.corpus import Corpus
from evenpack.data.sources.kinds import held_out, names_validation_documents
from evenpack.data.sources.without_text import megatron_prefix
from evenpack.data.tokenizers.tokenizer import Tokenizer
from evenpack.data.tokens.array_file import write_array
from evenpack.data.tokens.file import TokenFile, bin_path, hash_documents, index_path
from evenpack.data.tokens.writer import hashes_path, read_journal
from evenpack.errors import DataError
from evenpack.files import file_checksum

_DOCUMENTS_AT_ONCE = 1 << 20
_QUOTED_CHARACTERS = 60


ViewMaker = Callable[[str, TokenFile, Int64[np.ndarray, " documents"]], SequenceView]
"""Makes the sequences of documents, stored in the split's folder, from split, token file and documents."""


@dataclass(frozen=True, kw_only=True)
class SourcePreparation(SourceInPreparation):
    """The preparation of a source of text, or of a token file."""

    shared: SharedTokens | None
    """Shared tokens; None: the tokens of text are in the prepared directory."""

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
            refuse_other_origin(prefix, origin, self.folder)
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
            _check_ends(self.name, token_file, end_of_text=self.vocabulary.end_of_text_id)
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
        return build_view(recipe, token_file, documents, directory=folder)

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
        return write_pairs(
            SentenceIndex.open(token_file),
            documents,
            settings,
            folder,
            origin=origin,
            reporter=replace(reporter, stage="pairs", total_bytes=text_bytes),
        )

    def _mask_drawing(self, recipe: SentencePairsRecipe, tokenizer: Tokenizer) -> MaskDrawing | None:
        if recipe.static_masks is None:
            return None
        vocabulary = tokenizer.masking_vocabulary()
        if recipe.static_masks.whole_words:
            vocabulary.require_words()
        return MaskDrawing(
            config=recipe.static_masks,
            vocabulary=vocabulary,
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


def _check_ends(name: str, token_file: TokenFile, *, end_of_text: int) -> None:
    """Checks the documents' ends. Raises: DataError if one does not end in the end-of-text id."""
    (unended,) = np.nonzero(~token_file.ends_in(end_of_text) & (token_file.document_lengths() > 0))
    if len(unended):
        raise DataError(
            f"source '{name}': {len(unended)} of {token_file.documents} documents of {token_file.prefix} do not end in "
            f"the end-of-text id {end_of_text}, document {unended[0]} first; write the file with Megatron-LM's "
            f"--append-eod, correct data.tokenizer.end_of_text_id, or allow it with "
            f"data.sources.{name}.require_end_of_text=false"
        )


def check_overlap(
    name: str,
    source: SourceOfFiles | HubSource,
    identities: UInt64[np.ndarray, " documents"],
    corpus: Corpus,
    progress: Progress,
) -> None:
    """Counts the training documents whose text is also the text of a validation document.

    It takes 8 bytes of memory for each document for validation.

    Args:
        identities: `Document.stored_identity` of each document, possibly mapped from a file.
        corpus: read again for the message of an error.

    Raises: DataError that quotes the first one, unless the source allows them.
    """
    held_out = np.concatenate([_hashes(part, is_held_out=True) for part in _parts(identities)])
    found = [hashes[np.isin(hashes, held_out)] for part in _parts(identities) for hashes in [_hashes(part)]]
    shared = np.concatenate(found)
    if not len(shared):
        return
    if not source.allow_validation_overlap:
        key = "validation_split" if isinstance(source, HubSource) else "validation_path"
        raise DataError(
            f"source '{name}': {len(shared):,} training documents are also in its {key}, first the one that begins "
            f"{_beginning(corpus, int(shared[0]))!r}; validation documents must not be trained on: remove them from "
            f"one of the two, or allow it with data.sources.{name}.allow_validation_overlap=true"
        )
    progress.note(
        f"source '{name}': {len(shared):,} training documents are also validation documents, and are trained on "
        "(allow_validation_overlap)"
    )


def note_nothing_held_out(config: DataConfig, name: str, *, documents: int, progress: Progress) -> None:
    """Warns that no sequence of source `name`, which has so many `documents`, is held out, although that was asked."""
    warning = f"warning: source '{name}' holds nothing out, and will have no validation loss: "
    if names_validation_documents(config.sources[name]):
        progress.note(f"{warning}the recipe takes none of the documents that its section names for validation")
    elif config.validation_fraction:
        progress.note(
            f"{warning}of its {documents} documents none that the recipe takes falls into data.validation_fraction "
            f"({config.validation_fraction:g}); raise it, give the source more documents, or name files for "
            f"validation (data.sources.{name}.validation_path)"
        )


def _parts(identities: UInt64[np.ndarray, " documents"]) -> list[UInt64[np.ndarray, " part"]]:
    return [identities[begin : begin + _DOCUMENTS_AT_ONCE] for begin in range(0, len(identities), _DOCUMENTS_AT_ONCE)]


def _hashes(part: UInt64[np.ndarray, " part"], *, is_held_out: bool = False) -> UInt64[np.ndarray, " chosen"]:
    """Returns the hashes of the documents of one split, without the bit that names it."""
    one = np.uint64(1)
    chosen: UInt64[np.ndarray, " chosen"] = part[(part & one).astype(np.bool_) == is_held_out] >> one
    return chosen


def _beginning(corpus: Corpus, hashed: int) -> str:
    """Returns the first characters of the document with this hash."""
    texts = (document.text for document in corpus.documents() if document.identity >> 1 == hashed)
    return next(texts)[:_QUOTED_CHARACTERS]
