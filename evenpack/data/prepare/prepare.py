"""From sources to a prepared directory: tokenizer, token files, splits, strategies, and `manifest.json` last.

    DIR/manifest.json
    DIR/tokenizer/                             the files for `AutoTokenizer.from_pretrained`
    DIR/sources/NAME/tokens.{bin,idx}          whole documents (a Megatron source is used in its original location)
    DIR/sources/NAME/document_hashes.npy       equal documents have equal hashes, and the split depends on them
                                               (neither for shards, whose sequences are finished; both are elsewhere
                                               with data.tokens_dir: tokens_dir.py)
    DIR/sources/NAME/shuffled.{bin,idx}        the training sequences in random order, where `data.shuffle` is `grid`
    DIR/sources/NAME/{train,validation}/       the recipe's view, the strategies, the sorted sequences

A finished directory to which a run adds a source gets its files and a manifest with all sources; other runs of the
directory read theirs as before, and a tokenizer that was trained stays as it is.

An interrupted call is resumed: finished sources stay, and a half-written token file continues at its journal, after its
content has been compared with the journal's checksums. A second call on a finished directory compares every file with
the manifest's checksums and changes nothing.
"""

import shutil
from pathlib import Path

from evenpack import console
from evenpack.data.config import DataConfig
from evenpack.data.manifest import (
    MANIFEST,
    TOKENIZER_FOLDER,
    TRAINED_ON,
    FileRecord,
    Manifest,
    SourceRecord,
    TokenizerRecord,
    data_section,
)
from evenpack.data.order.stored_plan import packed
from evenpack.data.packing import LengthHistogram
from evenpack.data.prepare.directory import hold_lock, refuse_foreign_files, remove_leftovers
from evenpack.data.prepare.shards import ShardPreparation
from evenpack.data.prepare.source import SourcePreparation
from evenpack.data.prepare.tokenising import encoding_threads
from evenpack.data.prepare.tokenizer import prepare_tokenizer, tokenizer_files, tokenizer_record
from evenpack.data.prepare.workers import Workers
from evenpack.data.recipes import MaskedPairsRecipe, SentencePairsRecipe
from evenpack.data.sequences.pair_drawing import LANGUAGES_WITH_RULES
from evenpack.data.sources.config import Hdf5Source, MegatronSource
from evenpack.data.sources.files import refuse_splits
from evenpack.data.sources.kinds import open_corpus, source_inputs
from evenpack.data.tokenizers.config import ExternalTokenizer, TrainedTokenizer, TrainedWordPieces
from evenpack.data.tokenizers.loading import load_tokenizer
from evenpack.data.tokenizers.tokenizer import Tokenizer
from evenpack.data.verification import Verifier, refuse_changed_sources
from evenpack.errors import DataError
from evenpack.files import explained, system_error
from evenpack.progress import Progress
from evenpack.units import counted


def prepare(
    config: DataConfig,
    directory: Path,
    *,
    progress: Progress | None = None,
    workers: Workers | None = None,
    tokenizer: Tokenizer | None = None,
) -> Manifest:
    """Prepares `directory`, resumes an interrupted call, or finds that it is done.

    Args:
        progress: shows the stages of each source, and messages; None: nothing is shown.
        workers: processes that tokenise text; None: this process. The output does not depend on it.
        tokenizer: replaces the one that the section names or trains, for text that the tokenizer of a run is to encode;
            None: the section's tokenizer.

    Raises: DataError for invalid sources, tokenizers and directories, if the directory belongs to other data, and for
    errors of the system; RunError if a token file cannot be written; PackingError for limits that cannot be packed.
    """
    directory = directory.absolute()
    progress = progress or Progress(console.messages(), silent=True)
    before = _finished(config, directory)
    if before is not None and before.sources.keys() >= config.sources.keys():
        return _confirm(before.of_sources(config.sources), config, directory, progress)
    preparation = _Preparation(config, directory, progress, before=before, workers=workers, tokenizer=tokenizer)
    with hold_lock(directory):
        if _finished(config, directory) != before:  # by the previous holder of the lock
            raise DataError(f"another call has just prepared {directory}: run the same command again")
        refuse_foreign_files(directory)
        try:
            return preparation.run()
        except DataError:
            _clear_if_without_sources(directory)
            raise
        except OSError as error:
            raise DataError(system_error(error, None if error.filename else directory)) from error


def _finished(config: DataConfig, directory: Path) -> Manifest | None:
    """Returns the manifest, if there is one and this run's data can be there: it may add sources to those it shares.

    Raises: DataError if it belongs to other data, or the system cannot say.
    """
    path = directory / MANIFEST
    with explained(path, DataError):
        if not path.is_file():
            return None
    manifest = Manifest.read(directory)
    manifest.refuse_other_data(config, directory)
    return manifest


def _confirm(manifest: Manifest, config: DataConfig, directory: Path, progress: Progress) -> Manifest:
    """Returns the manifest of a finished set, if its sources and every file are as they were."""
    refuse_changed_sources(config, manifest, directory)
    verifier = Verifier(directory, manifest)
    verifier.refuse(verifier.verify_all(progress).damages)
    progress.note(f"{directory} is prepared already, and every file is as it was written: nothing to do")
    return manifest


class _Preparation:
    """One call, after everything is checked that can be before the first byte is written."""

    def __init__(
        self,
        config: DataConfig,
        directory: Path,
        progress: Progress,
        *,
        before: Manifest | None,
        workers: Workers | None,
        tokenizer: Tokenizer | None,
    ) -> None:
        # One sequence, so that a wrong name or limit is found before hours of work.
        packed(LengthHistogram.from_lengths([1], longest=1), config.packing, pack_length=config.pack_length)
        encoding_threads()  # a wrong environment variable is found before anything is written
        self.before = before
        """The manifest of the finished directory to which sources are added."""
        if before is not None:
            new = {name: source for name, source in config.sources.items() if name not in before.sources}
            config = config.model_copy(update={"sources": new})
        self.config = config
        self.directory = directory
        self.workers = workers
        refuse_splits(
            list(config.sources),
            "and each source is trained on: leave the held-out ones out (data.sources), and name their files in a "
            "validation_path; sources of a mixture have other names",
        )
        self.inputs = {name: source_inputs(name, source) for name, source in config.sources.items()}
        self.corpora = {
            name: open_corpus(name, source)
            for name, source in config.sources.items()
            if not isinstance(source, MegatronSource | Hdf5Source)
        }
        """Corpora of the text sources."""
        if tokenizer is None and not isinstance(
            config.tokenizer, ExternalTokenizer | TrainedTokenizer | TrainedWordPieces
        ):
            tokenizer = load_tokenizer(config.tokenizer)
        _check_pair_tokens(config, tokenizer)
        self.tokenizer = tokenizer
        """The tokenizer; None if it is still to be trained, or if the source holds tokens."""
        self.progress = progress
        self.tokens_dir = _tokens_dir(config, directory)
        """Folder of shared tokens; None if the directory has tokens of its own."""

    def run(self) -> Manifest:
        remove_leftovers(self.directory)
        self._refuse_other_sources()
        self._note_language()
        data, before = data_section(self.config), self.before
        if before is None:
            tokenizer = prepare_tokenizer(
                self.config,
                self.directory,
                loaded=self.tokenizer,
                corpora=self.corpora,
                inputs=self.inputs,
                progress=self.progress,
                tokens_dir=self.tokens_dir,
            )
            vocabulary = tokenizer_record(self.config, tokenizer)
            files, records = tokenizer_files(self.directory), {}
        else:
            tokenizer, vocabulary = self._earlier_tokenizer(before), before.tokenizer
            files, records = dict(before.files), dict(before.sources)
            data = before.data | {"sources": before.data["sources"] | data["sources"]}
        for name in self.config.sources:
            records[name], source_files = self._prepare_source(name, tokenizer, vocabulary)
            files |= source_files
            self._note_nothing_held_out(name, records[name])
        manifest = Manifest(data=data, tokenizer=vocabulary, sources=records, files=files)
        manifest.write(self.directory)
        return manifest

    def _earlier_tokenizer(self, before: Manifest) -> Tokenizer | None:
        """Returns the tokenizer of the finished directory; None if its sources hold tokens.

        Raises: DataError if it is damaged, or the one that the run names has changed.
        """
        folder = self.directory / TOKENIZER_FOLDER
        tokenizer = Tokenizer.load(folder) if folder.is_dir() else None
        for found in (tokenizer, self.tokenizer):
            if found is not None and found.checksum != before.tokenizer.checksum:
                raise DataError(
                    f"the tokenizer of {self.directory} is not the one that its sources were prepared with, or the one "
                    "that the run file names has changed: a source cannot be added. Restore it, or choose another "
                    "data.prepared_dir"
                )
        return tokenizer

    def _note_language(self) -> None:
        recipe = self.config.recipe
        if isinstance(recipe, SentencePairsRecipe) and recipe.language not in LANGUAGES_WITH_RULES:
            self.progress.note(
                f"data.recipe.language {recipe.language}: sentencex has no rules for it, and uses the rules of "
                f"a related language, or of English; it has them for {', '.join(sorted(LANGUAGES_WITH_RULES))}"
            )

    def _note_nothing_held_out(self, name: str, record: SourceRecord) -> None:
        source, fraction = self.config.sources[name], self.config.validation_fraction
        if record.validation.packing is None and (fraction or source.has_validation_documents):
            self.progress.note(
                f"warning: source '{name}' holds nothing out, and will have no validation loss: of its "
                f"{counted(record.documents, 'document')} the recipe takes none that is held out; give it more "
                f"documents, divide them (data.sources.{name}.rows), or name longer ones for validation"
            )

    def _prepare_source(
        self, name: str, tokenizer: Tokenizer | None, vocabulary: TokenizerRecord
    ) -> tuple[SourceRecord, dict[str, FileRecord]]:
        source = self.config.sources[name]
        if isinstance(source, Hdf5Source):
            return ShardPreparation(
                name=name,
                source=source,
                config=self.config,
                directory=self.directory,
                inputs=self.inputs[name],
                vocabulary=vocabulary,
                pair_tokens=None if tokenizer is None else tokenizer.pair_tokens,
                progress=self.progress,
            ).run()
        preparation = SourcePreparation(
            name=name,
            config=self.config,
            directory=self.directory,
            inputs=self.inputs[name],
            vocabulary=vocabulary,
            progress=self.progress,
            tokens_dir=self.tokens_dir,
        )
        if isinstance(source, MegatronSource):
            self.progress.note(f"source '{name}': checking and hashing {source.path}")
            return preparation.from_token_file(source)
        assert tokenizer is not None, "text sources and external vocabularies exclude each other"
        return preparation.from_text(self.corpora[name], tokenizer, self.workers)

    def _refuse_other_sources(self) -> None:
        folder = self.directory / "sources"
        found = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
        earlier = {} if self.before is None else self.before.sources
        unknown = sorted(found - self.config.sources.keys() - earlier.keys())
        if unknown:
            raise DataError(
                f"{folder / unknown[0]} was begun by an interrupted call, but this run has no source '{unknown[0]}': "
                "remove that folder, or name the source as it was"
            )


def _tokens_dir(config: DataConfig, directory: Path) -> Path | None:
    """Returns the folder of shared tokens. Raises: DataError if it would be within the prepared directory."""
    if config.tokens_dir is None:
        return None
    shared = config.tokens_dir.absolute()
    if shared.is_relative_to(directory):
        raise DataError(
            f"data.tokens_dir ({shared}) is within the prepared directory {directory}, which then cannot be removed "
            "without the tokens of others: choose a folder outside of it"
        )
    return shared


def _check_pair_tokens(config: DataConfig, tokenizer: Tokenizer | None) -> None:
    """Checks the vocabulary. Raises: DataError if pairs are requested and it is not, or will not be, one for them."""
    if not isinstance(config.recipe, SentencePairsRecipe | MaskedPairsRecipe):
        return
    if isinstance(config.tokenizer, TrainedTokenizer):
        raise DataError(
            "recipe sentence_pairs needs [CLS], [SEP] and [MASK], which a byte-level vocabulary trained here lacks: "
            "set data.tokenizer.kind=train_word_pieces, or take a BERT vocabulary with kind=bert"
        )
    if tokenizer is not None:
        _ = tokenizer.pair_tokens


def _clear_if_without_sources(directory: Path) -> None:
    """Removes all files of a call that failed before it had any result worth keeping."""
    sources = directory / "sources"
    if sources.is_dir() and any(sources.iterdir()):
        return
    (directory / TRAINED_ON).unlink(missing_ok=True)
    for folder in (sources, directory / TOKENIZER_FOLDER):
        shutil.rmtree(folder, ignore_errors=True)
