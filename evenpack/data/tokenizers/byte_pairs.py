"""Byte-level BPE as GPT-2 uses it: vocab.json and merges.txt, or trained here; in the form of `tokenizers`."""

from collections.abc import Iterable
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from evenpack.data.limits import LONGEST_TRAINED_WORD
from evenpack.data.tokenizers.backend import first_file, warn_if_smaller
from evenpack.data.tokenizers.config import TrainedTokenizer
from evenpack.errors import DataError

END_OF_TEXT = "<|endoftext|>"

_VOCABULARY_NAMES = ("vocab.json", "encoder.json")
_MERGES_NAMES = ("merges.txt", "vocab.bpe")
"""Names of GPT-2's files, as transformers and as OpenAI call them."""


def byte_pairs_files(directory: Path) -> tuple[Path, Path]:
    """Returns the paths of vocabulary and merges. Raises: DataError if the folder lacks one."""
    return first_file(directory, *_VOCABULARY_NAMES), first_file(directory, *_MERGES_NAMES)


def read_byte_pairs(directory: Path) -> tokenizers.Tokenizer:
    """Reads GPT-2's byte-level BPE from a folder. Raises: DataError if its two files are missing or do not match.

    It is built from parts of `tokenizers`: transformers 5 silently accepts `GPT2TokenizerFast(vocab_file=...)` and
    returns an empty vocabulary.
    """
    vocabulary_file, merges_file = byte_pairs_files(directory)
    try:
        vocabulary, merges = models.BPE.read_file(str(vocabulary_file), str(merges_file))
        backend = _byte_level(models.BPE(vocabulary, merges))
    except Exception as error:  # `tokenizers` raises bare Exception
        raise DataError(f"{vocabulary_file} and {merges_file} form no byte-level BPE: {error}") from error
    _check_gpt2_vocabulary(vocabulary, merges, vocabulary_file, merges_file)
    backend.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return backend


def train_byte_pairs(config: TrainedTokenizer, texts: Iterable[str]) -> tokenizers.Tokenizer:
    """Trains a byte-level BPE on `texts`, the same for the same texts. End-of-text has id 0.

    Little text yields fewer entries than requested, with a warning. Raises: DataError without any text.
    """
    backend = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocabulary_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    whole_words = backend.pre_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence([whole_words, pre_tokenizers.FixedLength(LONGEST_TRAINED_WORD)])
    backend.train_from_iterator(texts, trainer=trainer)
    backend.pre_tokenizer = whole_words
    size = backend.get_vocab_size()
    if size <= 257:
        raise DataError(
            "the training documents yield no token beyond single bytes: a tokenizer cannot be trained on them"
        )
    warn_if_smaller(size, config.vocabulary_size)
    return backend


def _check_gpt2_vocabulary(
    vocabulary: dict[str, int], merges: list[tuple[str, str]], vocabulary_file: Path, merges_file: Path
) -> None:
    """Checks that each entry is a byte, the result of a merge, or special, and that ids are 0 to n - 1."""
    missing = [
        token for token in (END_OF_TEXT, *sorted(pre_tokenizers.ByteLevel.alphabet())) if token not in vocabulary
    ]
    if missing:
        raise DataError(
            f"{vocabulary_file} is not a GPT-2 vocabulary: of the end-of-text token and the 256 bytes, its "
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


def _byte_level(model: models.BPE) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend
