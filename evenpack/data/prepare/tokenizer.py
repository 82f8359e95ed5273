"""The tokenizer of a prepared directory: loaded or trained, and saved there."""

from collections.abc import Mapping
from functools import partial
from itertools import chain
from pathlib import Path

from evenpack.data.config import DataConfig
from evenpack.data.manifest import TOKENIZER_FOLDER, TRAINED_ON, FileRecord, TokenizerRecord
from evenpack.data.prepare.progress import SourceProgress
from evenpack.data.prepare.tokenising import training_texts
from evenpack.data.prepare.tokens_dir import Origin, held_tokens, origin_hash, training_origin
from evenpack.data.sources.corpus import Corpus
from evenpack.data.sources.files import InputFile
from evenpack.data.tokenizers.config import ExternalTokenizer, TrainedTokenizer, TrainedWordPieces
from evenpack.data.tokenizers.loading import tokenizer_inputs, train_tokenizer
from evenpack.data.tokenizers.tokenizer import Tokenizer
from evenpack.errors import DataError
from evenpack.files import atomic_directory, file_checksum, read_json_object, write_json
from evenpack.progress import Progress


def prepare_tokenizer(
    config: DataConfig,
    directory: Path,
    *,
    loaded: Tokenizer | None,
    corpora: Mapping[str, Corpus],
    inputs: Mapping[str, tuple[InputFile, ...]],
    progress: Progress,
    tokens_dir: Path | None,
) -> Tokenizer | None:
    """Saves the loaded tokenizer, or trains one unless an earlier call did; None if the source holds tokens.

    A tokenizer that is trained in `tokens_dir`, for all who share it, is copied. One that was trained in this
    directory is used again.

    Raises: DataError for a source that cannot be read.
    """
    folder = directory / TOKENIZER_FOLDER
    if loaded is not None:
        _save(loaded, folder)
        return loaded
    if not isinstance(config.tokenizer, TrainedTokenizer | TrainedWordPieces):
        return None
    origin = training_origin(config, inputs)
    train = partial(_train, config, corpora=corpora, origin=origin, progress=progress)
    if tokens_dir is None or (directory / TRAINED_ON).is_file():
        return train(directory)
    with held_tokens(tokens_dir, TOKENIZER_FOLDER, origin) as place:
        tokenizer = train(place)
    _save(tokenizer, folder)
    return tokenizer


def _train(
    config: DataConfig, directory: Path, *, corpora: Mapping[str, Corpus], origin: Origin, progress: Progress
) -> Tokenizer:
    """Trains the tokenizer of a directory, unless an earlier call did from the same data and its files are whole."""
    assert isinstance(config.tokenizer, TrainedTokenizer | TrainedWordPieces), "no other is trained"
    folder = directory / TOKENIZER_FOLDER
    found = read_json_object(directory / TRAINED_ON) or {}
    record = {"origin": origin_hash(origin), "files": _file_checksums(folder)}
    if found | record == found:
        return Tokenizer.load(folder)
    texts = chain.from_iterable(
        training_texts(
            corpus,
            config.sources[name],
            validation_fraction=config.validation_fraction,
            progress=SourceProgress(progress, name, "tokenizer", corpus.total_bytes),
        )
        for name, corpus in corpora.items()
    )
    tokenizer = train_tokenizer(config.tokenizer, texts)
    with atomic_directory(folder, replaces=True) as unfinished:
        tokenizer.save(unfinished)
        write_json(directory / TRAINED_ON, record | {"files": _file_checksums(unfinished)})
    return Tokenizer.load(folder)


def tokenizer_record(config: DataConfig, tokenizer: Tokenizer | None) -> TokenizerRecord:
    """Returns the record of the vocabulary. Raises: DataError if an external one is inconsistent."""
    if isinstance(config.tokenizer, ExternalTokenizer):
        size, end_of_text_id = config.tokenizer.vocabulary_size, config.tokenizer.end_of_text_id
        if end_of_text_id >= size:
            raise DataError(
                f"data.tokenizer.end_of_text_id ({end_of_text_id}) is outside the vocabulary of {size} entries"
            )
        return TokenizerRecord(vocabulary_size=size, end_of_text_id=end_of_text_id, checksum="", inputs=())
    assert tokenizer is not None, "every other kind is loaded or trained"
    return TokenizerRecord(
        vocabulary_size=tokenizer.vocabulary_size,
        end_of_text_id=tokenizer.end_of_text_id,
        checksum=tokenizer.checksum,
        inputs=tokenizer_inputs(config.tokenizer),
    )


def tokenizer_files(directory: Path) -> dict[str, FileRecord]:
    """Returns the saved files, none for an external vocabulary."""
    folder = directory / TOKENIZER_FOLDER
    if not folder.is_dir():
        return {}
    return {
        (name := path.relative_to(directory).as_posix()): FileRecord.of(path, name) for path in sorted(folder.iterdir())
    }


def _save(tokenizer: Tokenizer, folder: Path) -> None:
    with atomic_directory(folder, replaces=True) as unfinished:
        tokenizer.save(unfinished)


def _file_checksums(folder: Path) -> dict[str, str]:
    return {path.name: file_checksum(path) for path in sorted(folder.glob("*")) if path.is_file()}
