"""WordPiece as BERT uses it: vocab.txt, tokenizer.json, or trained here; in the form of `tokenizers`."""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from types import MappingProxyType

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from evenpack.data.limits import LONGEST_TRAINED_WORD
from evenpack.data.tokenizers.backend import BACKEND_FILE, first_file, warn_if_smaller
from evenpack.data.tokenizers.config import TrainedWordPieces
from evenpack.errors import DataError

UNKNOWN = "[UNK]"
ROLES: Mapping[str, str] = MappingProxyType(
    {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
)
"""BERT's special tokens by transformers' names for their roles."""
CONTINUATION = "##"
"""Prefix of a piece that continues the word before."""

_SPECIAL = ("[PAD]", UNKNOWN, "[CLS]", "[SEP]", "[MASK]")
VOCABULARY_FILE = "vocab.txt"
_ALWAYS_KEPT_LETTERS = 256
_LETTER_COVERAGE = 0.9995
log = logging.getLogger(__name__)


def read_word_pieces(directory: Path, *, lower_case: bool | None) -> tokenizers.Tokenizer:
    """Reads BERT's tokenizer from vocab.txt; `lower_case` None: text is lowercased if no entry has a capital letter.

    Raises: DataError if no file is there or readable, if the vocabulary lacks a special token, or if its letters
    contradict `lower_case`.
    """
    path = first_file(directory, BACKEND_FILE, VOCABULARY_FILE)
    try:
        vocabulary: dict[str, int] = models.WordPiece.read_file(str(path))
    except Exception as error:  # `tokenizers` raises bare Exception
        raise DataError(f"{path} is not a readable WordPiece vocabulary: {error}") from error
    refuse_missing_tokens(vocabulary, path)
    cased = [token for token in vocabulary if token != token.lower() and not token.startswith("[")]
    if lower_case is not None and lower_case == bool(cased):
        example = f"has capital letters ('{cased[0]}' first)" if cased else "has no capital letter"
        raise DataError(
            f"{path} {example}, and data.tokenizer.lower_case is {str(lower_case).lower()}: words would become "
            f"unknown; set it to {str(not lower_case).lower()}, or give the other vocabulary"
        )
    return _assemble(vocabulary, lower_case=not cased)


def train_word_pieces(config: TrainedWordPieces, texts: Iterable[str]) -> tokenizers.Tokenizer:
    """Trains a WordPiece vocabulary on `texts`, the same for the same texts; the special tokens have ids 0 to 4.

    Of more than 256 different letters the most frequent are entries, at least 256 and as many as cover 99.95 % of the
    text; the rare ones of other scripts are unknown, and logged. Little text yields fewer entries than requested, with
    a warning. Raises: DataError without any text, and if the vocabulary size is too small for the letters.
    """
    kept = list(texts)
    letters = _letters(kept, lower_case=config.lower_case)
    # The trainer numbers letters inside words as it meets them in a hash map, in another order each time, unless all
    # are numbered before.
    first = [*_SPECIAL, *letters, *(f"{CONTINUATION}{letter}" for letter in letters)]
    if not letters or len(first) >= config.vocabulary_size:
        raise DataError(
            f"the training documents have {len(letters)} different letters to keep: a WordPiece vocabulary needs more "
            f"than {len(first)} entries, data.tokenizer.vocabulary_size is {config.vocabulary_size}"
        )
    backend = _assemble(dict(zip(_SPECIAL, range(len(_SPECIAL)), strict=True)), lower_case=config.lower_case)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [backend.pre_tokenizer, pre_tokenizers.FixedLength(LONGEST_TRAINED_WORD)]
    )
    trainer = trainers.WordPieceTrainer(
        vocab_size=config.vocabulary_size,
        special_tokens=first,
        initial_alphabet=letters,
        limit_alphabet=len(letters),
        show_progress=False,
    )
    backend.train_from_iterator(kept, trainer=trainer)
    vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    warn_if_smaller(len(vocabulary), config.vocabulary_size)
    return _assemble(vocabulary, lower_case=config.lower_case)


def _assemble(vocabulary: dict[str, int], *, lower_case: bool) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token=UNKNOWN))
    backend.normalizer = normalizers.BertNormalizer(lowercase=lower_case)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix=CONTINUATION)
    backend.post_processor = processors.BertProcessing(("[SEP]", vocabulary["[SEP]"]), ("[CLS]", vocabulary["[CLS]"]))
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    return backend


def _letters(texts: list[str], *, lower_case: bool) -> list[str]:
    """Returns, in order, the characters of the text as the vocabulary will see it, without the rare ones of many."""
    normalizer = normalizers.BertNormalizer(lowercase=lower_case)
    counts: Counter[str] = Counter()
    for character, count in Counter(chain.from_iterable(texts)).items():
        for letter in normalizer.normalize_str(character):
            if not letter.isspace():
                counts[letter] += count
    by_frequency = sorted(counts, key=lambda letter: (-counts[letter], letter))
    covered = np.cumsum([counts[letter] for letter in by_frequency])
    total = covered[-1] if len(covered) else 0
    needed = max(_ALWAYS_KEPT_LETTERS, int(np.searchsorted(covered, _LETTER_COVERAGE * total)) + 1)
    if needed < len(by_frequency):
        log.info(
            "%d of %d different letters are entries of the vocabulary; the others, %.3f %% of the text, are unknown",
            needed,
            len(by_frequency),
            100 * (1 - covered[needed - 1] / total),
        )
    return sorted(by_frequency[:needed])


def refuse_missing_tokens(vocabulary: Mapping[str, int], place: str | Path) -> None:
    """Checks the names of BERT's special tokens. Raises: DataError naming those that the vocabulary lacks."""
    missing = [token for token in _SPECIAL if token not in vocabulary]
    if missing:
        raise DataError(
            f"{place} is not a BERT vocabulary: its {len(vocabulary)} entries lack {', '.join(missing)}; take the file "
            "that the model was made with"
        )
