"""Prepares one source: its token file, its splits, and their accounting."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64, UInt64

from evenpack.data.checksums import Checksums
from evenpack.data.keys import derive_key, key_of_name
from evenpack.data.manifest import SPLITS, TOKENIZER_FOLDER, FileRecord, SourceRecord, data_section
from evenpack.data.prepare.pairs import PairSettings, write_pairs
from evenpack.data.prepare.progress import SourceProgress
from evenpack.data.prepare.splits import SourceInPreparation
from evenpack.data.prepare.tokenising import TokenisingState, append_parts, columns, encoder, no_documents_error
from evenpack.data.prepare.tokens_dir import (
    Origin,
    held_tokens,
    recorded_path,
    refuse_other_origin,
    sentence_language,
    tokens_origin,
)
from evenpack.data.prepare.workers import PartTask, Workers
from evenpack.data.prepared import Split
from evenpack.data.recipes import ConcatRecipe, DocumentsRecipe, PaddingRecipe, SentencePairsRecipe
from evenpack.data.sequences import PAIRS, SequenceView, build_view
from evenpack.data.sequences.pair_drawing import MaskDrawing, SentenceIndex
from evenpack.data.sequences.shuffled import SHUFFLED, SOURCE_IDS, OrderedView, ShuffledView
from evenpack.data.shuffle.config import GridShuffle
from evenpack.data.shuffle.grid import Grid, choose_grid
from evenpack.data.shuffle.shuffle import GridShuffler, remove_shuffle
from evenpack.data.sources.config import HubSource, MegatronSource, SourceOfFiles
from evenpack.data.sources.corpus import Corpus
from evenpack.data.sources.kinds import held_out, source_inputs
from evenpack.data.sources.rows import RowCorpus
from evenpack.data.sources.without_text import megatron_prefix
from evenpack.data.tokenizers.tokenizer import Tokenizer
from evenpack.data.tokens.array_file import open_array, write_array
from evenpack.data.tokens.file import TokenFile, bin_path, hash_documents, index_path
from evenpack.data.tokens.writer import TokenFileWriter, column_path, hashes_path, read_journal
from evenpack.errors import DataError
from evenpack.files import file_checksum

SMALLEST_PART_BYTES = 1 << 24
_LARGEST_PART_BYTES = 1 << 30
_MOST_PARTS = 1 << 10
_DOCUMENTS_AT_ONCE = 1 << 20
_QUOTED_CHARACTERS = 60


@dataclass(frozen=True, kw_only=True)
class WrittenTokens:
    """A finished token file, with the counts and columns stored for it."""

    token_file: TokenFile
    columns: tuple[Path, ...]
    """Columns that are stored for each document in addition to its tokens, the hashes first."""
    state: TokenisingState
    """The counts of tokenising; zeros for a token file that was not written here."""
    checksums: Mapping[str, Checksums]
    """Known checksums of files, by name."""

    @property
    def identities(self) -> UInt64[np.ndarray, " documents"]:
        """`Document.stored_identity` of each document."""
        return open_array(self.columns[0])


ViewMaker = Callable[[Split, TokenFile, Int64[np.ndarray, " documents"]], SequenceView]
"""Makes the sequences of documents, stored in the split's folder, from split, token file and documents."""


@dataclass(frozen=True, kw_only=True)
class SourcePreparation(SourceInPreparation):
    """The preparation of a source of text, or of a token file."""

    tokens_dir: Path | None
    """Folder of shared tokens; None: the tokens of text are in the prepared directory."""

    def from_text(
        self, corpus: Corpus, tokenizer: Tokenizer, workers: Workers | None
    ) -> tuple[SourceRecord, dict[str, FileRecord]]:
        """Tokenises the corpus, or resumes that; the bytes are the same with workers and without.

        Raises: DataError if the source is invalid or changes meanwhile (its output is removed), or if an earlier call
        began with another source or tokenizer. RunError if the disk is full, or if a worker dies: then it is kept.
        """
        origin = self._origin()
        with self._tokens_folder(origin) as folder:
            prefix = folder / "tokens"
            refuse_other_origin(prefix, origin, self.folder)
            try:
                written = self._write_tokens(corpus, prefix, tokenizer, workers, origin)
            except DataError:
                with suppress(OSError):  # it stays if there is something in it
                    self.folder.rmdir()
                raise
        self._check_overlap(corpus, written)
        pairs = isinstance(self.config.recipe, SentencePairsRecipe)
        return self._finish(written, partial(self._pairs_view, tokenizer) if pairs else self._documents_view)

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
        written = WrittenTokens(
            token_file=token_file, columns=(hashes,), state=TokenisingState(origin={}), checksums={}
        )
        return self._finish(written, self._documents_view)

    def _origin(self) -> Origin:
        return tokens_origin(self.config, self.name, self.inputs, tokenizer_checksum=self.vocabulary.checksum)

    @contextmanager
    def _tokens_folder(self, origin: Origin) -> Iterator[Path]:
        """Returns the folder for the token file; files of an earlier call in the prepared directory stay there."""
        if self.tokens_dir is None or read_journal(self.folder / "tokens") is not None:
            yield self.folder
            return
        _remove_unfinished(self.folder / "tokens")
        with held_tokens(self.tokens_dir, self.name, origin) as folder:
            yield folder

    def _write_tokens(
        self, corpus: Corpus, prefix: Path, tokenizer: Tokenizer, workers: Workers | None, origin: Origin
    ) -> WrittenTokens:
        """Writes the token file, or resumes it."""
        kept = columns(sentence_language(self.config))
        progress = SourceProgress(self.progress, self.name, "tokens", corpus.total_bytes)
        with TokenFileWriter.resume(prefix, vocabulary_size=tokenizer.vocabulary_size, columns=kept) as writer:
            state = TokenisingState.of_json(writer.state) if writer.state else TokenisingState(origin=origin)
            resumed = corpus.total_bytes if writer.complete else state.bytes_read

            def report(state: TokenisingState) -> None:
                progress.report(
                    documents=writer.documents, tokens=writer.tokens, bytes_read=state.bytes_read, bytes_resumed=resumed
                )

            if writer.complete:
                self.progress.note(f"source '{self.name}': {prefix.parent} holds its tokens already")
                report(replace(state, bytes_read=resumed))
            else:
                try:
                    state = self._append_all(corpus, writer, tokenizer, workers, state, report=report)
                    self._refuse_changes_meanwhile()
                    _check_content(corpus, self.name, writer, state)
                except DataError:
                    writer.abandon()
                    raise
                finally:
                    shutil.rmtree(_parts_folder(prefix), ignore_errors=True)
            journal = writer.finish(state.to_json())
        return WrittenTokens(
            token_file=TokenFile(prefix),
            columns=tuple(column_path(prefix, name) for name in kept),
            state=state,
            checksums=journal.checksums,
        )

    def _append_all(
        self,
        corpus: Corpus,
        writer: TokenFileWriter,
        tokenizer: Tokenizer,
        workers: Workers | None,
        state: TokenisingState,
        *,
        report: Callable[[TokenisingState], None],
    ) -> TokenisingState:
        """Appends the missing documents. Returns: the state at the end."""
        language = sentence_language(self.config)
        parts, encode = corpus.parts(part_bytes(corpus.total_bytes)), encoder(tokenizer, language)
        if workers is None or len(parts) - state.parts < 2:
            return append_parts(parts, encode, writer, state, report=report)
        if writer.documents > state.part_documents:  # begun by a single process
            state = append_parts(parts[: state.parts + 1], encode, writer, state, report=report)
        folder = _parts_folder(writer.prefix)
        shutil.rmtree(folder, ignore_errors=True)  # of a call that was killed
        tasks = [
            PartTask(
                number=number,
                part=parts[number],
                source=self.name,
                prefix=folder / f"{number:06d}" / "tokens",
                tokenizer_folder=self.directory / TOKENIZER_FOLDER,
                tokenizer_checksum=tokenizer.checksum,
                language=language,
            )
            for number in range(state.parts, len(parts))
        ]
        with closing(workers.files(tasks)) as files:  # concatenated in their order while later ones are written
            for file in files:
                file.append_to(writer)
                state = state.with_part(file.state, documents=writer.documents)
                writer.commit(state.to_json())
                shutil.rmtree(file.prefix.parent)
                report(state)
        return state

    def _refuse_changes_meanwhile(self) -> None:
        """Checks the source after reading. Raises: DataError if its files differ from those before reading."""
        now = source_inputs(self.name, self.config.sources[self.name])
        changed = sorted({file.path for file in {*self.inputs, *now} - ({*self.inputs} & {*now})})
        if changed:
            raise DataError(
                f"source '{self.name}' changed while it was read: {changed[0]} is new, gone or of another size or time "
                f"(first of {len(changed)}); its output is removed. Prepare again when no process writes to its files"
            )

    def _check_overlap(self, corpus: Corpus, written: WrittenTokens) -> None:
        """Counts the training documents whose text is also the text of a document that is named for validation.

        It takes 8 bytes of memory for each document for validation.

        Raises: DataError that quotes the first one, for which the corpus is read again, unless the source allows them;
        unshared tokens are removed then.
        """
        source = self.config.sources[self.name]
        if not source.has_validation_documents:
            return
        assert isinstance(source, SourceOfFiles | HubSource), "no other kind names documents"
        held_out_hashes = np.concatenate(list(_hashes(written.identities, are_held_out=True)))
        training_hashes = _hashes(written.identities, are_held_out=False)
        shared = np.concatenate([hashes[np.isin(hashes, held_out_hashes)] for hashes in training_hashes])
        if not len(shared):
            return
        if source.allow_validation_overlap:
            self.progress.note(
                f"source '{self.name}': {len(shared):,} training documents are also validation documents, and are "
                "trained on (allow_validation_overlap)"
            )
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        key = "validation_split" if isinstance(source, HubSource) else "validation_path"
        raise DataError(
            f"source '{self.name}': {len(shared):,} training documents are also in its {key}, first the one that "
            f"begins {_beginning(corpus, int(shared[0]))!r}; validation documents must not be trained on: remove them "
            f"from one of the two, or allow it with data.sources.{self.name}.allow_validation_overlap=true"
        )

    def _finish(self, written: WrittenTokens, make_view: ViewMaker) -> tuple[SourceRecord, dict[str, FileRecord]]:
        """Makes splits, sequences and strategies, and then the accounting."""
        source = self.config.sources[self.name]
        is_held_out = held_out(written.identities, source, self.config.validation_fraction)
        splits = {}
        for split, chosen in zip(SPLITS, (~is_held_out, is_held_out), strict=True):
            view = make_view(split, written.token_file, np.flatnonzero(chosen))
            if split == "train":
                view = self._in_training_order(view, written)
            splits[split] = self.store_split(split, view)
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
            token_file=recorded_path(written.token_file.prefix, self.directory, self.tokens_dir),
            documents=written.token_file.documents,
            tokens=written.token_file.tokens,
            text_bytes=written.state.text_bytes,
            unknown_tokens=written.state.unknown_tokens,
            rows=written.state.rows,
            train=splits["train"],
            validation=splits["validation"],
        )
        return record, self._files(written)

    def _in_training_order(self, view: SequenceView, written: WrittenTokens) -> SequenceView:
        """Returns the sequences of the view as a grid shuffle writes them.

        Without a grid shuffle it returns the view itself, and removes the files of an earlier one.

        Raises: DataError if the grid cannot keep its memory limit, or if files of an earlier call are damaged; RunError
        if the disk is full.
        """
        shuffle = self.config.shuffle
        if not isinstance(shuffle, GridShuffle) or view.count == 0:
            remove_shuffle(self.folder)
            return view
        assert isinstance(view, OrderedView), "the configuration takes no other recipes"
        tokens, sequences = view.accounting.tokens_kept, view.count
        token_bytes = tokens * view.token_file.dtype.itemsize
        grid = choose_grid(
            token_bytes=token_bytes,
            sequences=sequences,
            memory=shuffle.memory,
            seed=int(derive_key(shuffle.seed, key_of_name(self.name))),
            rows=shuffle.rows,
            columns=shuffle.columns,
        )
        self.progress.note(f"source '{self.name}': shuffling in a grid of {grid.rows} rows and {grid.columns} columns")
        shown = SourceProgress(self.progress, self.name, "shuffle", 2 * token_bytes)

        def report_progress(written_sequences: int, bytes_read: int) -> None:
            written_tokens = written_sequences * tokens // sequences
            shown.report(documents=written_sequences, tokens=written_tokens, bytes_read=bytes_read, bytes_resumed=0)

        GridShuffler(
            view=view,
            grid=grid,
            folder=self.folder,
            vocabulary_size=self.vocabulary.vocabulary_size,
            origin=self._shuffle_origin(written, grid),
            report_progress=report_progress,
        ).run()
        return ShuffledView(view, TokenFile(self.folder / SHUFFLED))

    def _shuffle_origin(self, written: WrittenTokens, grid: Grid) -> dict[str, Any]:
        """Returns everything that decides the shuffled sequences and their order."""
        tokens = written.checksums.get(bin_path(written.token_file.prefix).name)
        section = data_section(self.config)
        return {
            # If the source holds tokens, the hashes are of the tokens.
            "tokens": file_checksum(written.columns[0]) if tokens is None else tokens.whole,
            "recipe": section["recipe"],
            "validation_fraction": section["validation_fraction"],
            "grid": asdict(grid),
        }

    def _documents_view(
        self, split: Split, token_file: TokenFile, documents: Int64[np.ndarray, " documents"]
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
        split: Split,
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
        journal = read_journal(folder / PAIRS)
        if folder.exists() and (journal is None or journal.state.get("origin") != origin):
            shutil.rmtree(folder)
        _, lengths = token_file.spans(documents)
        text_bytes = passes * int((lengths - 1).sum()) * token_file.dtype.itemsize
        return write_pairs(
            SentenceIndex.open(token_file),
            documents,
            settings,
            folder,
            origin=origin,
            progress=SourceProgress(self.progress, self.name, "pairs", text_bytes),
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
            source_key=key_of_name(self.name),
        )

    def _files(self, written: WrittenTokens) -> dict[str, FileRecord]:
        """Returns every file by a name that does not depend on its location."""
        prefix = written.token_file.prefix
        paths = {f"tokens{path.suffix}": path for path in (bin_path(prefix), index_path(prefix))}
        paths |= {path.name: path for path in written.columns}
        files = {}
        for name, path in paths.items():
            recorded = recorded_path(path, self.directory, self.tokens_dir)
            files[f"sources/{self.name}/{name}"] = FileRecord.of(path, recorded, written.checksums.get(path.name))
        shuffled = self.folder / SHUFFLED
        journal = read_journal(shuffled)
        if journal is not None:
            for path in (bin_path(shuffled), index_path(shuffled), column_path(shuffled, SOURCE_IDS)):
                name = path.relative_to(self.directory).as_posix()
                files[name] = FileRecord.of(path, name, journal.checksums[path.name])
        return files | self.split_files()


def part_bytes(total_bytes: int) -> int:
    """Returns the target size of a part: a thousandth of a source, within 16 MiB and 1 GiB.

    That is work for many workers, and little is lost with one.
    """
    return min(max(total_bytes // _MOST_PARTS, SMALLEST_PART_BYTES), _LARGEST_PART_BYTES)


def _remove_unfinished(prefix: Path) -> None:
    """Removes what a call wrote that was killed before its journal."""
    shutil.rmtree(_parts_folder(prefix), ignore_errors=True)
    for path in prefix.parent.glob(f"{prefix.name}.*.partial"):
        path.unlink(missing_ok=True)


def _parts_folder(prefix: Path) -> Path:
    """Returns the folder of the parts' files until they are concatenated."""
    return prefix.with_name(f"{prefix.name}.parts")


def _check_content(corpus: Corpus, source: str, writer: TokenFileWriter, state: TokenisingState) -> None:
    """Checks the content. Raises: DataError for a source without documents, or without a known token."""
    if isinstance(corpus, RowCorpus) and state.rows is not None:
        corpus.refuse_none_kept(state.rows)
    if writer.documents == 0:
        raise no_documents_error(source)
    if not state.has_known_tokens(writer.tokens, writer.documents):
        raise DataError(
            f"the text of source '{source}' encodes to nothing but unknown tokens, or to no token at all: "
            "the tokenizer's vocabulary is not of this text, or the text is empty"
        )


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


def _hashes(
    identities: UInt64[np.ndarray, " documents"], *, are_held_out: bool
) -> Iterator[UInt64[np.ndarray, " chosen"]]:
    """Yields the hashes of the documents of one split, some at a time, without the bit that names it.

    Args:
        identities: `Document.stored_identity` of each document, possibly mapped from a file.
    """
    one = np.uint64(1)
    for begin in range(0, len(identities), _DOCUMENTS_AT_ONCE):
        part = identities[begin : begin + _DOCUMENTS_AT_ONCE]
        yield part[(part & one).astype(np.bool_) == are_held_out] >> one


def _beginning(corpus: Corpus, hashed: int) -> str:
    """Returns the first characters of the document with this hash."""
    texts = (document.text for document in corpus.documents() if document.identity >> 1 == hashed)
    return next(texts)[:_QUOTED_CHARACTERS]
