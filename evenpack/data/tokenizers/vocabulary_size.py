"""The size of a tokenizer's vocabulary, before any text is read with it."""

from evenpack.data.tokenizers.config import BertTokenizer, Gpt2Tokenizer, HubTokenizer, TokenizerConfig
from evenpack.data.tokenizers.loading import load_tokenizer

_PUBLISHED = {"gpt2": 50_257, "bert": 30_522}
"""Sizes for a run file that does not name the files yet."""


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
