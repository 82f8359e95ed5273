"""Loads the tokenizer that a run file names, or trains it; reads vocabularies, to tell one from another.

A run's documents are made with a `Tokenizer`; a `TokenCounter` measures single texts or pairs, including the special
tokens that the tokenizer's own template puts around them. Both find a tokenizer in one way, `_find`, in a folder or in
what the hub has under a name:

    tokenizer.json                          as `tokenizers` reads it, whatever class the folder names
    vocab.txt, vocab.json with merges.txt   as the run file's kind says; for a counter, as kinds bert and gpt2 do
    other files                             as the class converts them that tokenizer_config.json or config.json names

Where the class makes other tokens of a text than the first two, that is said, with both. No code of a folder is run.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from jaxtyping import Int64

from evenpack.data.ranges import cut
from evenpack.data.sources.files import InputFile
from evenpack.data.tokenizers.backend import (
    BACKEND_FILE,
    first_file,
    guarded_tokens,
    prepare_backend,
    read_backend,
    text_encoder,
    unknown_of,
    warn_once,
)
from evenpack.data.tokenizers.byte_pairs import END_OF_TEXT, byte_pairs_files, read_byte_pairs, train_byte_pairs
from evenpack.data.tokenizers.comparison import plainest_difference, probe_texts, template_of
from evenpack.data.tokenizers.config import (
    Beginning,
    BertTokenizer,
    EncoderChoice,
    Gpt2Tokenizer,
    HubTokenizer,
    TokenizerConfig,
    TrainedTokenizer,
    TrainedWordPieces,
)
from evenpack.data.tokenizers.tokenizer import BOUNDS, CONFIG_FILE, Tokenizer
from evenpack.data.tokenizers.word_pieces import (
    ROLES,
    UNKNOWN,
    VOCABULARY_FILE,
    read_word_pieces,
    refuse_missing_tokens,
    train_word_pieces,
)
from evenpack.errors import DataError
from evenpack.files import expand_user, read_json

_PUBLISHED = {"gpt2": 50_257, "bert": 30_522}
"""Sizes for a run file that does not name the files yet."""
_BATCH_CHARACTERS = 1 << 20
"""Characters encoded together: a token of an encoding takes about a hundred bytes."""
_CLASS_FILES = (CONFIG_FILE, "config.json")
"""Files that name the class of transformers."""
_ADDED_FILE = "added_tokens.json"
_HUB_FILES = ("*.json", "*.txt", "*.model*", "*.spm", "*.tiktoken", "*.bpe", "*.codes", "*.vocab")
"""Files of a tokenizer on the hub; code and weights are not among them."""


def load_tokenizer(config: Gpt2Tokenizer | BertTokenizer | HubTokenizer) -> Tokenizer:
    """Loads the tokenizer that the run file names. Raises: DataError if it is missing or its vocabulary is wrong."""
    if isinstance(config, HubTokenizer):
        return _hub(config)
    if isinstance(config, Gpt2Tokenizer):
        if config.path is None:
            raise DataError(
                "the tokenizer has no path: give data.tokenizer.path=FOLDER (with tokenizer.json, or with vocab.json "
                "and merges.txt)"
            )
        found = _find(config.path, encoder=config.encoder, assemble=read_byte_pairs)
        if found.backend.token_to_id(END_OF_TEXT) is None:
            raise DataError(
                f"tokenizer {config.path} has no '{END_OF_TEXT}', which ends the documents of kind gpt2: give "
                f"data.tokenizer.kind=hub data.tokenizer.name={config.path}, which takes the end that the folder names"
            )
        bounds = dict.fromkeys(BOUNDS, END_OF_TEXT)
        return _tokenizer(found, END_OF_TEXT, roles={}, bounds=bounds, beginning=config.beginning)
    place = config.path or config.name
    if place is None:
        raise DataError(
            "the tokenizer has no path: give data.tokenizer.path=FOLDER (with vocab.txt or tokenizer.json) or "
            "data.tokenizer.name=NAME of the hub"
        )
    tokenizer = _bert(place, lower_case=config.lower_case, encoder=config.encoder)
    if not config.lower_case and tokenizer.lower_cases:  # true is the default, of which nobody need have thought
        raise DataError(
            f"data.tokenizer.lower_case is false, and the files of tokenizer {place} lower-case text: leave "
            "the key out, which is for a vocab.txt alone, or give another tokenizer"
        )
    return tokenizer


def tokenizer_of_weights(folder: Path) -> Tokenizer:
    """Loads the WordPiece tokenizer in a folder, in the form of `Tokenizer.save`, transformers or `vocab.txt`.

    With `vocab.txt` alone, text is lowercased if no entry has a capital letter. Raises: DataError if there is no
    tokenizer, or a vocabulary without BERT's special tokens.
    """
    return _bert(folder, lower_case=None, encoder="files")


def tokenizer_inputs(config: TokenizerConfig) -> tuple[InputFile, ...]:
    """Returns the tokenizer's files as they are now; none for a name on the hub or a tokenizer to be trained."""
    match config:
        case Gpt2Tokenizer(path=Path() as path, encoder="files"):
            whole = path / BACKEND_FILE
            return tuple(InputFile.of(file) for file in ((whole,) if whole.is_file() else byte_pairs_files(path)))
        case BertTokenizer(path=Path() as path, encoder="files"):
            return (InputFile.of(first_file(path, BACKEND_FILE, VOCABULARY_FILE)),)
        case Gpt2Tokenizer(path=Path() as folder) | BertTokenizer(path=Path() as folder):
            pass
        case HubTokenizer(name=name) if expand_user(name).is_dir():
            folder = expand_user(name)
        case _:
            return ()
    return tuple(InputFile.of(path) for path in sorted(folder.iterdir()) if path.is_file())


def train_tokenizer(config: TrainedTokenizer | TrainedWordPieces, texts: Iterable[str]) -> Tokenizer:
    """Trains a vocabulary on `texts`: byte-level BPE with end-of-text 0, or WordPiece as BERT's.

    The same texts give the same vocabulary. Little text yields fewer entries than requested, with a warning.

    Raises: DataError without any text.
    """
    if isinstance(config, TrainedWordPieces):
        return _of_word_pieces(train_word_pieces(config, texts))
    return Tokenizer(train_byte_pairs(config, texts), end_of_text=END_OF_TEXT, unknown=None)


Assemble = Callable[[Path], tokenizers.Tokenizer | None]
"""Makes a tokenizer of a folder's vocabulary files."""


@dataclass(frozen=True, kw_only=True)
class _Found:
    """A tokenizer as it is in a folder."""

    origin: str
    """The folder or the name, for people."""
    backend: tokenizers.Tokenizer
    theirs: Any
    """transformers' tokenizer of the class that the folder names; None if it names none."""

    @property
    def is_fast(self) -> bool:
        """Whether the class is one of `tokenizers`, and not of Python."""
        return self.theirs is not None and self.theirs.is_fast

    def named(self, roles: Iterable[str]) -> dict[str, str]:
        """Returns the tokens of the vocabulary that the class has for these roles."""
        tokens = {role: str(token) for role in roles if (token := getattr(self.theirs, role, None)) is not None}
        return {role: token for role, token in tokens.items() if self.backend.token_to_id(token) is not None}


def _find(
    place: str | Path, *, encoder: EncoderChoice = "files", assemble: Assemble = lambda _: None, hint: str = ""
) -> _Found:
    """Finds a tokenizer in a folder or on the hub.

    Args:
        place: a folder, or a name on the hub, which must not be a `Path`.
        encoder: `class` takes what the class makes of the files.
        assemble: reads a vocabulary in a folder without tokenizer.json; by default there is none that could be.
        hint: ends the message if there is no tokenizer.

    Raises: DataError if there is none, or one of a class with code of its own.
    """
    folder = expand_user(place)
    if not folder.is_dir() and isinstance(place, str):
        folder = _download(place, hint)
    _refuse_code(folder)
    ours: tokenizers.Tokenizer | None = None
    if encoder == "files":
        whole = folder / BACKEND_FILE
        ours = read_backend(whole) if whole.is_file() else assemble(folder)
    theirs = None
    if _names_class(folder):
        try:
            theirs = _of_class(folder, hint)
        except DataError as error:
            if ours is None:
                raise
            warn_once(f"{error}. Its tokens are not compared with the class's")
    if theirs is None and ours is not None and (added := folder / _ADDED_FILE).is_file():
        missing = [token for token in _read(added) if ours.token_to_id(token) is None]
        if missing:
            warn_once(
                f"{added} adds {missing[0]!r}, {len(missing)} in all, to entries which the other files hold: these are "
                f"not taken. To take them, name the class in {CONFIG_FILE} and set data.tokenizer.encoder=class"
            )
    if ours is None and theirs is None:
        raise DataError(
            f"{place} holds no {BACKEND_FILE}, nor {' or '.join(_CLASS_FILES)} with the class of its files{hint}"
        )
    special = [] if theirs is None else [str(token) for token in theirs.all_special_tokens]
    backend = _backend_of(theirs, folder) if ours is None else ours
    prepare_backend(backend, special)  # those of tokenizer_config.json among them
    if ours is None and encoder == "files":
        _refuse_other_pieces(folder, theirs)
    elif ours is not None and theirs is not None:
        _warn_of_difference(place, ours, theirs, special)
    return _Found(origin=str(place), backend=backend, theirs=theirs)


def _names_class(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _CLASS_FILES)


def _download(name: str, hint: str) -> Path:
    """Returns the folder with the tokenizer's files of a name on the hub, as they are in its cache or fetched now."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(_HUB_FILES)))
    except Exception as error:  # of the network, of the name, of the disk
        raise DataError(f"tokenizer '{name}' is no folder, and was not found on the hub: {error}{hint}") from error


def _refuse_code(folder: Path) -> None:
    """Raises DataError if the folder names a tokenizer class of its own, whose code would have to be run."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        return
    named = _read(path).get("auto_map", {})
    if not isinstance(named, dict) or named.get("AutoTokenizer"):
        raise DataError(
            f"{path}: auto_map names code of this folder as its tokenizer ({named}), and no code of a folder is run "
            f"here. If its {BACKEND_FILE} is the whole tokenizer, remove the key auto_map; else name another tokenizer"
        )


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _of_class(folder: Path, hint: str) -> Any:
    """Returns transformers' tokenizer of the class that a folder names. Raises: DataError if it cannot be loaded."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:  # transformers raises all errors of its readers
        raise DataError(f"AutoTokenizer.from_pretrained('{folder}') failed: {error}{hint}") from error


def _backend_of(theirs: Any, folder: Path) -> tokenizers.Tokenizer:
    """Returns what a class made of the files. Raises: DataError if the class is Python, or if there are no files.

    transformers makes a vocabulary of special tokens alone where it finds no file.
    """
    if not theirs.is_fast:
        raise DataError(
            f"tokenizer '{folder}' exists in Python only ({type(theirs).__name__}); one with a {BACKEND_FILE} is needed"
        )
    first_file(folder, *_vocabulary_names(theirs))
    return theirs.backend_tokenizer


def _vocabulary_names(theirs: Any) -> list[str]:
    """Returns the names of files from which transformers makes a tokenizer of this class."""
    own = {name for kind, name in theirs.vocab_files_names.items() if kind != "merges_file"}
    return sorted(own | {BACKEND_FILE, "tokenizer.model"})


def _refuse_other_pieces(folder: Path, theirs: Any) -> None:
    """Compares what a class made of a SentencePiece model with what the library `sentencepiece` makes of it.

    transformers reads such a model with that library, and builds another tokenizer from its pieces.

    Raises: DataError with a text that becomes other pieces.
    """
    path = first_file(folder, *_vocabulary_names(theirs))
    if path.suffix not in (".model", ".spm"):
        return
    try:
        from sentencepiece import SentencePieceProcessor

        processor = SentencePieceProcessor(model_file=str(path))
    except Exception as error:  # it is not installed, or the file is one of `tiktoken`
        warn_once(f"{path} is taken as {type(theirs).__name__} reads it, and compared with nothing: {error}")
        return
    backend = theirs.backend_tokenizer
    encode = _encode(backend)

    unknown = {theirs.unk_token_id, backend.token_to_id(processor.id_to_piece(processor.unk_id()))}

    def converted(text: str) -> list[str | None]:
        return [None if index in unknown else backend.id_to_token(index) for index in encode(text)]

    def pieces(text: str) -> list[str | None]:
        found = processor.encode(text)
        return [None if index == processor.unk_id() else processor.id_to_piece(index) for index in found]

    # Names of control pieces, bytes and special tokens are text for one, and may be themselves for the other.
    named = (processor.is_control, processor.is_unknown, processor.is_byte)
    names = {processor.id_to_piece(index) for index in range(len(processor)) if any(kind(index) for kind in named)}
    names |= guarded_tokens(backend).keys()
    texts = (text for text in probe_texts(backend) if not any(name in text for name in names))
    found = plainest_difference(texts, pieces, converted)
    if found is not None:
        text, by_model, by_class = found
        raise DataError(
            f"{path} makes {by_model} of the text {text!a} (None: unknown), and the class that the folder names, "
            f"{type(theirs).__name__}, makes {by_class}: give a folder with {BACKEND_FILE}, or take the class with "
            "data.tokenizer.encoder=class"
        )


def _warn_of_difference(place: str | Path, ours: tokenizers.Tokenizer, theirs: Any, special: Collection[str]) -> None:
    """Says where the class that a folder names has other entries than its files, or makes other tokens of a text."""
    if theirs.is_fast:
        prepare_backend(theirs.backend_tokenizer, special, is_said=False)
        encode_theirs = _encode(theirs.backend_tokenizer)
    else:
        encode_theirs = partial(theirs.encode, add_special_tokens=False)
    folder = expand_user(place)
    taken, class_key = "The files are taken, everywhere", "data.tokenizer.encoder=class takes the class"
    if folder.is_dir() and not (folder / BACKEND_FILE).is_file():
        taken = "The files are taken, but not by data.tokenizer.kind=hub"
    added = theirs.get_added_vocab()
    entries = first_difference(ours.get_vocab(with_added_tokens=True), {**theirs.get_vocab(), **added})
    if entries is not None:
        warn_once(
            f"tokenizer {place}: its files and the class {type(theirs).__name__} that it names have other "
            f"vocabularies, {entries}. {taken}, and exported, without what the class adds; {class_key}"
        )
    found = plainest_difference(probe_texts(ours, more=added), _encode(ours), encode_theirs)
    if found is None:
        return
    text, by_files, by_class = found
    warn_once(
        f"tokenizer {place}: of the text {text!a} its files make {[ours.id_to_token(index) for index in by_files]}, "
        f"and the class {type(theirs).__name__} that it names {theirs.convert_ids_to_tokens(by_class)}. {taken}; "
        f"{class_key}"
    )


def _encode(backend: tokenizers.Tokenizer) -> Callable[[str], list[int]]:
    encoder = text_encoder(backend)
    return lambda text: list(encoder.encode(text, add_special_tokens=False).ids)


def _hub(config: HubTokenizer) -> Tokenizer:
    hint = (
        ". For a folder with only vocab.json and merges.txt give data.tokenizer.kind=gpt2, for one with vocab.txt "
        "kind=bert and path=FOLDER"
    )
    found = _find(config.name, encoder=config.encoder, hint=hint)
    bounds = found.named(BOUNDS)
    end_of_text = bounds.get("eos_token")
    if end_of_text is None:
        raise DataError(
            f"tokenizer '{config.name}' has no end-of-text token (eos_token) in its vocabulary, which each document "
            f"must end in: name one in its {CONFIG_FILE}"
        )
    return _tokenizer(found, end_of_text, roles=found.named(ROLES), bounds=bounds, beginning=config.beginning)


def _bert(place: str | Path, *, lower_case: bool | None, encoder: EncoderChoice) -> Tokenizer:
    def assemble(folder: Path) -> tokenizers.Tokenizer | None:
        if _names_class(folder) and not (folder / VOCABULARY_FILE).is_file():
            return None
        return read_word_pieces(folder, lower_case=lower_case)

    found = _find(place, encoder=encoder, assemble=assemble)
    end_of_text = found.named(ROLES).get("sep_token")
    if end_of_text is None:
        refuse_missing_tokens(found.backend.get_vocab(with_added_tokens=True), found.origin)
        return _of_word_pieces(found.backend)
    bounds = found.named(BOUNDS)
    if bounds.get("eos_token") != end_of_text:  # `load` takes an eos_token as the end of documents
        bounds.pop("eos_token", None)
    return _tokenizer(found, end_of_text, roles=found.named(ROLES), bounds=bounds, beginning="none")


def _tokenizer(
    found: _Found, end_of_text: str, *, roles: Mapping[str, str], bounds: Mapping[str, str], beginning: Beginning
) -> Tokenizer:
    """Returns the tokenizer of what was found; says so if the folder puts other tokens around a text.

    Raises: DataError if documents cannot begin as the run file says.
    """
    begins = bounds.get("bos_token")
    if beginning == "bos" and begins is None:
        raise DataError(
            f"data.tokenizer.beginning is bos, and tokenizer {found.origin} has no bos_token in its vocabulary: name "
            f"one in its {CONFIG_FILE}, or set beginning=none"
        )
    template = template_of(found.theirs.backend_tokenizer if found.is_fast else found.backend)
    unknown = unknown_of(found.backend) or found.named(["unk_token"]).get("unk_token")
    tokenizer = Tokenizer(
        found.backend,
        end_of_text=end_of_text,
        # GPT-2's class names its end-of-text as the unknown token, which a byte-level vocabulary never needs.
        unknown=None if unknown == end_of_text else unknown,
        roles=roles,
        bounds=bounds,
        beginning=begins if beginning == "bos" else None,
        padding_side=getattr(found.theirs, "padding_side", "right"),
    )
    if beginning == "bos" and tokenizer.beginning != begins:
        raise DataError(
            f"data.tokenizer.beginning is bos, and documents of tokenizer {found.origin} are "
            f"'{tokenizer.document_template}', since its sep_token ends them: leave beginning out"
        )
    if template != tokenizer.template:
        warn_once(
            f"tokenizer {found.origin}: it makes '{template}' of a text. Here documents are "
            f"'{tokenizer.document_template}', and the saved and exported tokenizer makes '{tokenizer.template}' of a "
            "prompt, as the model has learnt it; data.tokenizer.beginning decides what both begin with"
        )
    return tokenizer


def _of_word_pieces(backend: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(backend, end_of_text=ROLES["sep_token"], unknown=UNKNOWN, roles=ROLES, bounds={})


def vocabulary_size_of(tokenizer: TokenizerConfig) -> tuple[int, str] | None:
    """Returns the number of entries and its source, for people; None for a tokenizer of the hub, which is not queried.

    Raises: DataError for a folder without a tokenizer.
    """
    if isinstance(tokenizer, HubTokenizer) or (isinstance(tokenizer, BertTokenizer) and tokenizer.name is not None):
        return None
    if isinstance(tokenizer, Gpt2Tokenizer | BertTokenizer):
        if tokenizer.path is None:
            return _PUBLISHED[tokenizer.kind], f"that of the published {tokenizer.kind}"
        return load_tokenizer(tokenizer).vocabulary_size, f"which {tokenizer.path} holds"
    return tokenizer.vocabulary_size, "as the run file says"


def read_vocabulary(folder: Path) -> dict[str, int] | None:
    """Returns each token's id, from transformers' files in a folder; None for a folder without a vocabulary.

    Raises: DataError if a file of it is broken.
    """
    for name, read in _READERS.items():
        path = folder / name
        if path.is_file():
            try:
                return read(path)
            except Exception as error:  # `tokenizers` raises bare Exception
                raise DataError(f"{path} is not a readable vocabulary: {error}") from error
    return None


def first_difference(first: dict[str, int], second: dict[str, int]) -> str | None:
    """Returns the lowest id with different tokens, and the token in each; None if there is none."""
    names, others = ({index: token for token, index in words.items()} for words in (first, second))
    for index in sorted(names.keys() | others.keys()):
        if names.get(index) != others.get(index):
            return f"id {index} is {names.get(index)!r} in one and {others.get(index)!r} in the other"
    return None


def other_tokens(folder: Path, here: Path | Tokenizer) -> str | None:
    """Looks for text of which the tokenizer in a folder makes other tokens than the one here, with the same vocabulary.

    Merges, the splitting of words, lower-casing and what begins a document are in no vocabulary.

    Returns: both results, for people; None if there is no difference, or no whole tokenizer in a folder.
    """
    first, second = _assembled(folder), here.copied_backend() if isinstance(here, Tokenizer) else _assembled(here)
    if first is None or second is None or first.to_str() == second.to_str():
        return None
    special = guarded_tokens(first).keys() | guarded_tokens(second).keys()
    for backend in (first, second):
        prepare_backend(backend, special, is_said=False)
    found = plainest_difference(probe_texts(first), _encode(first), _encode(second))
    if found is not None:
        text, by_first, by_second = found
        names = [
            [backend.id_to_token(index) for index in ids] for backend, ids in ((first, by_first), (second, by_second))
        ]
        return f"of the text {text!a} it makes {names[0]}, and this one {names[1]}"
    templates = template_of(first), template_of(second)
    return (
        None if templates[0] == templates[1] else f"it makes '{templates[0]}' of a text, and this one '{templates[1]}'"
    )


def _assembled(folder: Path) -> tokenizers.Tokenizer | None:
    """Returns the tokenizer of a folder's files; None if they are those of none, or of a vocabulary alone."""
    if (folder / BACKEND_FILE).is_file():
        return read_backend(folder / BACKEND_FILE)
    try:
        is_bert = (folder / VOCABULARY_FILE).is_file()
        return read_word_pieces(folder, lower_case=None) if is_bert else read_byte_pairs(folder)
    except DataError:
        return None


_READERS: Mapping[str, Callable[[Path], dict[str, int]]] = {
    BACKEND_FILE: lambda path: tokenizers.Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True),
    "vocab.txt": lambda path: tokenizers.models.WordPiece.read_file(str(path)),
    "vocab.json": lambda path: {token: int(index) for token, index in read_json(path).items()},
}
"""Readers by file name; the first file that exists is used."""


class TokenCounter:
    """Measures texts. Special tokens are never recognised within a text."""

    def __init__(self, backend: tokenizers.Tokenizer, special: Collection[str] = ()) -> None:
        """Takes a backend as `prepare_backend` does. Raises: DataError if its vocabulary is empty."""
        prepare_backend(backend, special)
        self._encoder = text_encoder(backend)

    def lengths(self, texts: Sequence[str] | Sequence[tuple[str, str]]) -> Int64[np.ndarray, " texts"]:
        """Returns the tokens of each text or pair, including special ones; uses all cores."""
        lengths = np.zeros(len(texts), dtype=np.int64)
        sizes = [len(text) if isinstance(text, str) else len(text[0]) + len(text[1]) for text in texts]
        for start, stop in cut(np.append(0, np.cumsum(sizes, dtype=np.int64)), _BATCH_CHARACTERS):
            encodings = self._encoder.encode_batch_fast(list(texts[start:stop]))
            lengths[start:stop] = [len(encoding) for encoding in encodings]
        return lengths


def load_token_counter(name: str) -> TokenCounter:
    """Loads the tokenizer of a folder or of a name on the hub. Raises: DataError if it is missing or incomplete."""

    def assemble(folder: Path) -> tokenizers.Tokenizer | None:
        is_bert = (folder / VOCABULARY_FILE).is_file()
        try:
            return read_word_pieces(folder, lower_case=None) if is_bert else read_byte_pairs(folder)
        except DataError:
            if not _names_class(folder):
                raise
            return None  # neither BERT's files nor GPT-2's, and only `kind: hub` reads them

    found = _find(name, assemble=assemble)
    if found.is_fast and (template := template_of(found.backend)) != (
        theirs := template_of(found.theirs.backend_tokenizer)
    ):
        warn_once(
            f"tokenizer {name}: lengths are those of '{template}', as its files say; the class that it names makes "
            f"'{theirs}' of a text"
        )
    special = [token for token in (unknown_of(found.backend),) if token is not None]
    if not found.named(("eos_token", "sep_token")):  # only kinds that know the names of their tokens read the folder
        is_gpt2 = found.backend.token_to_id(END_OF_TEXT) is not None
        special += [END_OF_TEXT] if is_gpt2 else [UNKNOWN, *ROLES.values()]
    return TokenCounter(found.backend, special)


def tokenizer_kind_of(folder: Path, like: str) -> str:
    """Returns the kind that reads a folder, for a model whose run file has a tokenizer of the kind `like`.

    Where that is `hub`: the kind that reads a vocabulary alone, and `hub` for whole tokenizers and names. In
    place of GPT-2's kind `hub`, too, for a folder with a whole tokenizer and no such vocabulary.
    """
    if like != "hub":
        kind = {"train": "gpt2", "train_word_pieces": "bert"}.get(like, like)
        is_whole = (folder / BACKEND_FILE).is_file() and not (folder / "merges.txt").is_file()
        return "hub" if kind == "gpt2" and is_whole else kind
    if not (folder / BACKEND_FILE).exists():
        for kind, file in (("gpt2", "merges.txt"), ("bert", "vocab.txt")):
            if (folder / file).is_file():
                return kind
    return "hub"
