"""Looks for a text of which two tokenizers make different tokens, and tells what each puts around a text."""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import Any

import tokenizers

Encode = Callable[[str], list[Any]]
"""Returns the ids, or names, of a text's tokens, without those around it."""

_PROBES = (
    "In 2023 there were 12345678901 of 3.14159, 1,000,000",
    "It's We'LL DON'T I'm they've",
    "The Quick BROWN fox",
    "naïve café Ångström İstanbul ŁÓDŹ straße",
    "e\u0301 A\u030a \u212b \u01c6 \ufb01 \uff26\uff55\uff4c\uff4c ² ½ Ⅷ",
    "漢字かなカナ 中文\uff0c标点。한국어",
    "Привет Ελληνικά שלום مرحبا हिन्दी ไทย",
    "🙂👩‍👩‍👧🇩🇪",
    " one  two   three        eight\tand\t\ttabs",
    "lines\nand\r\nlines\n\n\n  of text  \n",
    "snake_case camelCase path/to/file.py x=y+z; {[(<>)]} -- ... != \\n",
    "soft\u00adhyphen zero\u200bwidth no\u00a0break \u2028 \x07 \ufffd",
    "\u201cquoted\u201d \u2018text\u2019 \u2013 \u2014 … `code` ```",
    "!",
    "a",
    "",
)
_VOCABULARY_PROBES = 2000


def probe_texts(backend: tokenizers.Tokenizer, more: Iterable[str] = ()) -> Iterator[str]:
    """Yields texts of many kinds, their words, and entries from all parts of the vocabulary, alone and in a text.

    `more` are entries that another tokenizer has.
    """
    for text in _PROBES:
        yield from text.split()
        yield text
    size = backend.get_vocab_size()
    spelled = (backend.decode([index]) for index in range(0, size, max(1, size // _VOCABULARY_PROBES)))
    added = [str(token) for token in backend.get_added_tokens_decoder().values()]
    for token in chain(spelled, added[:_VOCABULARY_PROBES], islice(more, _VOCABULARY_PROBES)):
        yield from (token, f"a{token} {token}b")


def plainest_difference(texts: Iterable[str], one: Encode, other: Encode) -> tuple[str, list[Any], list[Any]] | None:
    """Returns a text with other tokens in one than in the other, and both: short and of plain letters if it can."""
    encoded = ((text, _tokens(one, text), _tokens(other, text)) for text in texts)
    different = (each for each in encoded if each[1] != each[2])
    return min(
        different, key=lambda each: (not (each[0].isascii() and each[0].isprintable()), len(each[0])), default=None
    )


def _tokens(encode: Encode, text: str) -> list[Any]:
    try:
        return encode(text)
    except Exception:  # of a model without an unknown token; `tokenizers` raises bare Exception
        return []


def template_of(backend: tokenizers.Tokenizer) -> str:
    """Returns what a backend makes of a text, for example `[CLS] TEXT [SEP]`."""
    before, after = ids_around(backend)
    return " ".join([*map(str, map(backend.id_to_token, before)), "TEXT", *map(str, map(backend.id_to_token, after))])


def ids_around(backend: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """Returns the ids that a backend puts before and after a text."""
    for text in probe_texts(backend):
        try:
            inside, whole = backend.encode(text, add_special_tokens=False).ids, backend.encode(text).ids
        except Exception:  # of a model without an unknown token; `tokenizers` raises bare Exception
            continue
        for begins in range(len(whole) if inside else 0):
            if whole[begins : begins + len(inside)] == inside:
                return whole[:begins], whole[begins + len(inside) :]
    return [], []


def ends_pair(backend: tokenizers.Tokenizer, index: int) -> bool:
    """Returns whether a backend puts this id after the second text of a pair."""
    texts = (text for text in probe_texts(backend) if _tokens(lambda text: backend.encode(text).ids, text))
    return any(backend.encode(text, text).ids[-1] == index for text in islice(texts, 1))
