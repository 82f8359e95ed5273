"""Lines of JSON objects, for corpora and for tables of lengths."""

from collections.abc import Iterator
from typing import Any

from evenpack.data.sources.input_files import SourceReader
from evenpack.errors import DataError

JSONL_SUFFIXES = (".jsonl", ".jsonl.zst", ".jsonl.gz")
_MOST_KEYS_SHOWN = 20


def filled_lines(reader: SourceReader) -> Iterator[bytes]:
    """Yields the lines that hold more than white space; none is parsed."""
    return (line for line in reader.lines() if not line.isspace())


def value_of(found: dict[str, Any], key: str, where: str, *, remedy: str) -> Any:
    """Returns the value under `key`. Raises: DataError listing the existing keys."""
    if key not in found:
        keys = ", ".join(repr(name) for name in list(found)[:_MOST_KEYS_SHOWN])
        raise DataError(f"{where}: no key '{key}'; existing keys: {keys or 'none'}. {remedy}")
    return found[key]
