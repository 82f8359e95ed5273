"""From the path of somebody's text to the section of a source that reads it."""

from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from evenpack.data.sources.config import Source
from evenpack.data.sources.input_files import SourceReader
from evenpack.data.sources.json_lines import JSONL_SUFFIXES, filled_lines
from evenpack.data.sources.kinds import open_corpus
from evenpack.data.sources.saved_sets import ARROW_SUFFIXES, saved_splits
from evenpack.data.sources.source_files import files_below
from evenpack.errors import ConfigError, DataError

_KIND_OF_SUFFIX = {
    ".parquet": "parquet",
    ".txt": "text",
    ".md": "text",
    **dict.fromkeys(ARROW_SUFFIXES, "arrow"),
    **dict.fromkeys(JSONL_SUFFIXES, "jsonl"),
}


def source_section(path: Path, *, text_key: str | None) -> dict[str, Any]:
    """The section of a source of text at `path`, a file or a folder; its first document has been read.

    Args:
        text_key: the key or column of the text; None where there is only one that can be meant.

    Raises: ConfigError if the path or the kind of its files is not clear; DataError if they cannot be read.
    """
    kind = _kind_of(path)
    section: dict[str, Any] = {"kind": kind, "path": str(path)}
    if kind in ("jsonl", "parquet", "arrow"):
        section["text_key"] = text_key or _text_key(kind, path)
    elif text_key is not None:
        raise ConfigError(f"{path} holds plain text, which has no keys: leave out --text-key")
    _require_document(section)
    return section


def _kind_of(path: Path) -> str:
    if not path.exists():
        raise ConfigError(f"{path} does not exist: give the file or folder that holds the text")
    if path.is_dir() and saved_splits(path) is not None:
        return "arrow"
    files = [path] if path.is_file() else files_below(path)
    kinds = {kind for file in files if (kind := _kind_of_file(file)) is not None}
    if len(kinds) == 1:
        return kinds.pop()
    found = f"files of the kinds {' and '.join(sorted(kinds))}" if kinds else "no file of a known kind"
    raise ConfigError(
        f"{path} holds {found}: expected files of one kind, whose names end in {', '.join(_KIND_OF_SUFFIX)}; other "
        "sources, and several, are written into the run file by hand (evenpack config explain data.sources)"
    )


def _kind_of_file(file: Path) -> str | None:
    return next((kind for suffix, kind in _KIND_OF_SUFFIX.items() if file.name.endswith(suffix)), None)


def _text_key(kind: str, path: Path) -> str:
    """`text` where there is such a key; else the only one that holds strings."""
    names = _keys_of_strings(kind, path)
    if "text" in names or (kind == "arrow" and not names):
        return "text"
    if len(names) == 1:
        return names[0]
    found = f"the keys {', '.join(names)}" if names else "no key"
    raise ConfigError(
        f"{path} has {found} with strings, and none is 'text': say with --text-key which one holds the documents"
    )


def _keys_of_strings(kind: str, path: Path) -> list[str]:
    file = path if path.is_file() else next((file for file in files_below(path) if _kind_of_file(file) == kind), path)
    if kind == "jsonl":
        with SourceReader(file) as reader:
            line = next(filled_lines(reader), None)
            values = {} if line is None else reader.json_object(line)
        return [name for name, value in values.items() if isinstance(value, str)]
    import pyarrow as pa
    import pyarrow.dataset

    try:
        schema = pyarrow.dataset.dataset(file, format="parquet" if kind == "parquet" else "ipc").schema
    except (pa.ArrowInvalid, OSError):
        return []  # a stream, or damaged: reading its first document will show
    return [field.name for field in schema if pa.types.is_string(field.type) or pa.types.is_large_string(field.type)]


def _require_document(section: dict[str, Any]) -> None:
    source: Any = TypeAdapter(Source).validate_python(section)
    if next(iter(open_corpus("text", source).documents()), None) is None:
        raise DataError(f"{section['path']} holds no document")
