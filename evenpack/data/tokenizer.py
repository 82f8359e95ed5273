"""Text -> token ids, each document ended by the end-of-text token.

Whatever a tokenizer comes from, it ends up as one `tokenizers.Tokenizer`, whose encoder runs in Rust on all cores.
Special tokens are never read out of the text: a document that holds the characters `<|endoftext|>` stays one document.
"""

import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import xxhash
from jaxtyping import Int32, Int64
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from evenpack.data.data_config import Gpt2Tokenizer, HubTokenizer, TokenizerConfig, TrainedTokenizer
from evenpack.data.input_files import InputFile
from evenpack.errors import DataError
from evenpack.files import write_json, write_text

END_OF_TEXT = "<|endoftext|>"

_logger = logging.getLogger(__name__)
_BACKEND_FILE = "tokenizer.json"
_CONFIG_FILE = "tokenizer_config.json"
_VOCABULARY_NAMES = ("vocab.json", "encoder.json")
_MERGES_NAMES = ("merges.txt", "vocab.bpe")
"""As transformers and as OpenAI call GPT-2's files."""


@dataclass(frozen=True, kw_only=True)
class EncodedDocuments:
    """Some documents as tokens, one behind another."""

    tokens: Int32[np.ndarray, " tokens"]
    lengths: Int64[np.ndarray, " documents"]
    """Tokens of each document, its end-of-text included."""
    unknown_tokens: int
    """How many tokens stand for text that the vocabulary cannot express."""

    @property
    def says_nothing(self) -> bool:
        """True if no token of text came out, or only unknown ones: then the vocabulary is not of this text."""
        return self.unknown_tokens == len(self.tokens) - len(self.lengths)


class Tokenizer:
    """A `tokenizers.Tokenizer` with the id that ends a document."""

    def __init__(self, backend: tokenizers.Tokenizer, *, end_of_text: str, unknown: str | None) -> None:
        """`unknown` is the token for inexpressible text; None where there is none (byte-level vocabularies).

        Raises: DataError if the vocabulary is empty or lacks either token.
        """
        vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        if backend.get_vocab_size(with_added_tokens=False) == 0:
            raise DataError("the tokenizer's vocabulary is empty: a file of it is missing or was not found")
        for token in (end_of_text, unknown):
            if token is not None and token not in vocabulary:
                raise DataError(f"the tokenizer's vocabulary of {len(vocabulary)} entries lacks its token '{token}'")
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        self._backend = backend
        self._end_of_text = end_of_text
        self._unknown = unknown
        self._unknown_id = None if unknown is None else vocabulary[unknown]
        self.end_of_text_id = vocabulary[end_of_text]
        self.vocabulary_size = max(vocabulary.values()) + 1
        """Above the largest id: ids may have gaps."""

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """What encodes, without an end-of-text."""
        return self._backend

    def encode_batch(self, texts: Sequence[str]) -> EncodedDocuments:
        """Encodes documents on all cores, without holding Python's lock; each gets the end-of-text id at its end.

        Raises: DataError if the tokenizer finds its end-of-text token in a text.
        """
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        lengths = np.fromiter(map(len, encodings), dtype=np.int64, count=len(encodings)) + 1
        # One document's list of ids lives at a time: 25 ns a token, against 41 with the lists of a whole batch.
        ids = chain.from_iterable((encoding.ids, (self.end_of_text_id,)) for encoding in encodings)
        tokens = np.fromiter(chain.from_iterable(ids), dtype=np.int32, count=int(lengths.sum()))
        if np.count_nonzero(tokens == self.end_of_text_id) != len(texts):
            pairs = zip(texts, encodings, strict=True)
            culprit = next(text for text, encoding in pairs if self.end_of_text_id in encoding.ids)
            raise DataError(
                f"the tokenizer reads its end-of-text token '{self._end_of_text}' out of the text of the document "
                f"that begins {culprit[:60]!r}; documents would end where they do not: remove it from the text"
            )
        unknown = 0 if self._unknown_id is None else int(np.count_nonzero(tokens == self._unknown_id))
        return EncodedDocuments(tokens=tokens, lengths=lengths, unknown_tokens=unknown)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids, special tokens shown."""
        return str(self._backend.decode(list(tokens), skip_special_tokens=False))

    @property
    def checksum(self) -> str:
        """XXH3 (128 bits, hexadecimal) of everything that decides how text is encoded."""
        return xxhash.xxh3_128_hexdigest(f"{self._end_of_text}\n{self._backend.to_str()}".encode())

    def save(self, directory: Path) -> None:
        """Writes the form that `transformers.AutoTokenizer.from_pretrained(directory)` reads."""
        directory.mkdir(parents=True, exist_ok=True)
        special = {"bos_token": self._end_of_text, "eos_token": self._end_of_text}
        if self._unknown is not None:
            special["unk_token"] = self._unknown
        write_text(directory / _BACKEND_FILE, self._backend.to_str(pretty=True))
        write_json(
            directory / _CONFIG_FILE,
            {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **special},
        )

    @classmethod
    def load(cls, directory: Path) -> "Tokenizer":
        """Reads what `save` wrote. Raises: DataError if it is not there or not whole."""
        try:
            config = json.loads((directory / _CONFIG_FILE).read_text())
            backend = tokenizers.Tokenizer.from_str((directory / _BACKEND_FILE).read_text())
        except Exception as error:  # `tokenizers` raises bare Exception
            raise DataError(f"{directory} holds no readable tokenizer: {error}") from error
        return cls(backend, end_of_text=config["eos_token"], unknown=config.get("unk_token"))


def load_tokenizer(config: Gpt2Tokenizer | HubTokenizer) -> Tokenizer:
    """The tokenizer that the run file names. Raises: DataError if it is not there or its vocabulary is wrong."""
    if isinstance(config, HubTokenizer):
        return _from_hub(config.name)
    if config.path is None:
        raise DataError("the tokenizer has no path: give data.tokenizer.path=FOLDER (with vocab.json and merges.txt)")
    return _from_gpt2_files(config.path.expanduser())


def tokenizer_inputs(config: TokenizerConfig) -> tuple[InputFile, ...]:
    """The files that the tokenizer is read from, as they are now; none for a name of the hub, or a trained one."""
    match config:
        case Gpt2Tokenizer(path=Path() as path):
            folder = path.expanduser()
            return tuple(InputFile.of(_first_file(folder, *names)) for names in (_VOCABULARY_NAMES, _MERGES_NAMES))
        case HubTokenizer(name=name) if Path(name).is_dir():
            return tuple(InputFile.of(path) for path in sorted(Path(name).iterdir()) if path.is_file())
        case _:
            return ()


def train_tokenizer(config: TrainedTokenizer, texts: Iterable[str]) -> Tokenizer:
    """A byte-level BPE of `texts`, the same for the same texts. End-of-text has id 0.

    Little text yields fewer entries than asked for; a warning says so. Raises: DataError without any text.
    """
    backend = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocabulary_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer=trainer)
    size = backend.get_vocab_size()
    if size <= 257:
        raise DataError(
            "the training documents yield no token beyond single bytes: a tokenizer cannot be trained on them"
        )
    if size < config.vocabulary_size:
        _logger.warning("the text yields a vocabulary of %d entries, fewer than %d", size, config.vocabulary_size)
    return Tokenizer(backend, end_of_text=END_OF_TEXT, unknown=None)


def _from_gpt2_files(directory: Path) -> Tokenizer:
    """GPT-2's byte-level BPE.

    Built from `tokenizers` parts: transformers 5 takes `GPT2TokenizerFast(vocab_file=...)` without a word and gives
    an empty vocabulary.
    """
    vocabulary_file = _first_file(directory, *_VOCABULARY_NAMES)
    merges_file = _first_file(directory, *_MERGES_NAMES)
    try:
        vocabulary, merges = models.BPE.read_file(str(vocabulary_file), str(merges_file))
        backend = _byte_level(models.BPE(vocabulary, merges))
    except Exception as error:  # `tokenizers` raises bare Exception
        raise DataError(f"{vocabulary_file} and {merges_file} form no byte-level BPE: {error}") from error
    _check_gpt2_vocabulary(vocabulary, merges, vocabulary_file, merges_file)
    backend.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return Tokenizer(backend, end_of_text=END_OF_TEXT, unknown=None)


def _check_gpt2_vocabulary(
    vocabulary: dict[str, int], merges: list[tuple[str, str]], vocabulary_file: Path, merges_file: Path
) -> None:
    """Each entry is a byte, the result of a merge, or special; ids are 0 to n - 1."""
    missing = [
        token for token in (END_OF_TEXT, *sorted(pre_tokenizers.ByteLevel.alphabet())) if token not in vocabulary
    ]
    if missing:
        raise DataError(
            f"{vocabulary_file} is no GPT-2 vocabulary: of the end-of-text token and the 256 bytes, its "
            f"{len(vocabulary)} entries lack {len(missing)}, '{missing[0]}' first"
        )
    if sorted(vocabulary.values()) != list(range(len(vocabulary))):
        raise DataError(
            f"{vocabulary_file}: the ids of its {len(vocabulary)} entries are not 0 to {len(vocabulary) - 1}"
        )
    reachable = {left + right for left, right in merges}.union(pre_tokenizers.ByteLevel.alphabet())
    unreachable = [token for token in vocabulary if token not in reachable and not token.startswith(("<", "["))]
    if unreachable:
        raise DataError(
            f"{merges_file} does not belong to {vocabulary_file}, or is truncated: its {len(merges)} merges "
            f"never form {len(unreachable)} of the {len(vocabulary)} entries, '{unreachable[0]}' first"
        )


def fast_tokenizer(name: str, *, hint: str = "") -> Any:
    """transformers' tokenizer of a folder or of the hub. Raises: DataError, `hint` at its end, if there is none."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # transformers raises whatever its readers and the network raise
        raise DataError(f"AutoTokenizer.from_pretrained('{name}') failed: {error}{hint}") from error
    if not tokenizer.is_fast:
        raise DataError(f"tokenizer '{name}' exists in Python only; one with a tokenizer.json is needed")
    return tokenizer


def _from_hub(name: str) -> Tokenizer:
    tokenizer = fast_tokenizer(
        name, hint=". For a folder with only vocab.json and merges.txt give data.tokenizer.kind=gpt2"
    )
    if tokenizer.eos_token is None:
        raise DataError(f"tokenizer '{name}' has no end-of-text token (eos_token), which each document must end in")
    # GPT-2's class names its end-of-text as the unknown token, which a byte-level vocabulary never needs.
    unknown = None if tokenizer.unk_token == tokenizer.eos_token else tokenizer.unk_token
    return Tokenizer(tokenizer.backend_tokenizer, end_of_text=tokenizer.eos_token, unknown=unknown)


def _byte_level(model: models.BPE) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def _first_file(directory: Path, *names: str) -> Path:
    for name in names:
        if (directory / name).is_file():
            return directory / name
    raise DataError(
        f"tokenizer folder {directory} {'holds no' if directory.is_dir() else 'does not exist: expected'} "
        f"{' or '.join(names)}; give data.tokenizer.path=FOLDER"
    )
