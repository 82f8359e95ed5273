"""The text at paths that a user gives as sources of a run, by the endings of the files' names, and its preparation."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from glob import escape
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from rich.table import Table

from evenpack import console
from evenpack.data.manifest import Manifest
from evenpack.data.prepare.prepare import prepare
from evenpack.data.prepare.workers import Workers
from evenpack.data.sources.config import Source
from evenpack.data.sources.files import files_below, find_files
from evenpack.data.sources.kinds import KINDS, open_corpus, source_inputs
from evenpack.data.sources.lines import SourceReader
from evenpack.data.tokenizers.tokenizer import Tokenizer
from evenpack.engine.config import RunConfig
from evenpack.errors import ConfigError, DataError
from evenpack.files import expand_user
from evenpack.progress import FREQUENT_LINES_SECONDS, Progress
from evenpack.studies.columns import Column, table_of
from evenpack.units import counted

_ENDINGS = {name: kind.recognised_endings for name, kind in KINDS.items() if kind.recognised_endings}
"""Endings of files' names by the kind of their source."""

FEW_DOCUMENTS = 100
"""Below this number of documents, a hash that holds out a few per cent of them may take none."""
MOST_COUNTED = 10_000
"""Documents after which their count ends."""

_GLOB_CHARACTERS = re.compile(r"[*?[]")
_LONGEST_NAME = 40


@dataclass(frozen=True, kw_only=True)
class FoundText:
    """Files of one kind at a path that was given."""

    name: str
    """Name for their source."""
    kind: str
    path: str | tuple[str, ...]
    """What the section of the source says: the path itself, patterns, or the files."""
    files: tuple[Path, ...]

    @property
    def section(self) -> dict[str, Any]:
        """The section of the source, without how its documents are read."""
        path = self.path if isinstance(self.path, str) else list(self.path)
        return {"kind": self.kind, "path": path}


def find_text(paths: Sequence[str]) -> tuple[FoundText, ...]:
    """Returns the text at the paths of `--data`: files, folders or patterns, an entry for each kind of their files.

    Raises: ConfigError if a path leads to no file of text, or two to the same one.
    """
    found = [text for path in paths for text in _at_path(path)]
    seen: dict[Path, int] = {}
    for index, text in enumerate(found):
        for file in text.files:
            if seen.setdefault(file.resolve(), index) != index:
                raise ConfigError(f"--data: {file} is given twice: leave one of the two paths out")
    return tuple(_with_unique_names(found))


def source_sections(paths: Sequence[str], *, text_key: str | None) -> dict[str, dict[str, Any]]:
    """Returns the sections of sources that read the text at the paths; the first document of each has been read.

    Plain text in fewer files than `FEW_DOCUMENTS` is divided at blank lines, if that makes at least as many documents.

    Args:
        text_key: the key or column of the text; None where there is only one that can be meant.

    Raises: as `find_text`; ConfigError if the key is not clear; DataError if documents cannot be read.
    """
    found = find_text(paths)
    if text_key is not None and all(text.kind == "text" for text in found):
        raise ConfigError(f"{', '.join(paths)} holds plain text, which has no keys: leave out --text-key")
    sections = {}
    for text in found:
        section = sections[text.name] = text.section
        if text.kind != "text":
            section["text_key"] = text_key or _text_key(text)
        elif len(text.files) < FEW_DOCUMENTS:
            paragraphs = section | {"document_separator": "blank_line"}
            if count_documents(text.name, paragraphs, most=FEW_DOCUMENTS) == FEW_DOCUMENTS:
                section |= paragraphs
        if not count_documents(text.name, section, most=1):
            raise DataError(f"{_first(text.path)} holds no document")
    return sections


def count_documents(name: str, section: Mapping[str, Any], *, most: int = MOST_COUNTED) -> int:
    """Returns the number of documents of a source, of which at most `most` are read. Raises: DataError."""
    source: Any = TypeAdapter(Source).validate_python(section)
    return sum(1 for _ in islice(open_corpus(name, source).documents(), most))


def notes_of_plain_text(sections: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns a sentence for each source of plain text: its files, its documents, and the key that divides them."""
    return [_note_of_plain_text(name, section) for name, section in sections.items() if section["kind"] == "text"]


def _note_of_plain_text(name: str, section: Mapping[str, Any]) -> str:
    source: Any = TypeAdapter(Source).validate_python(section)
    files, key = len(source_inputs(name, source)), f"data.sources.{name}.document_separator"
    if source.document_separator == "file" and files >= FEW_DOCUMENTS:
        return f"{name}: {files:,} files, each one document ({key}: file; blank_line: each paragraph is one)"
    documents = count_documents(name, section)
    found = (
        f"{name}: {counted(files, 'file')} = {counted(documents, 'document')}{' or more' * (documents == MOST_COUNTED)}"
    )
    if source.document_separator == "file":
        parts = count_documents(name, {**section, "document_separator": "blank_line"})
        return (
            f"{found}, each file is one ({key}: file): too few to hold some out for validation. Blank lines would "
            f"divide it into {parts:,} ({key}: blank_line), fewer than {FEW_DOCUMENTS}; if each line is a document, "
            f"set {key}: line; else name files for validation (data.sources.{name}.validation_path)"
        )
    return f"{found}, the paragraphs between blank lines ({key}: blank_line; with file, each file would be one)"


def _at_path(given: str) -> Iterator[FoundText]:
    path = expand_user(given)
    files = _files_at(path)
    kinds = {kind: tuple(file for file in files if file.name.endswith(_ENDINGS[kind])) for kind in _ENDINGS}
    kinds = {kind: members for kind, members in kinds.items() if members}
    if not kinds:
        known = ", ".join(suffix for suffixes in _ENDINGS.values() for suffix in suffixes)
        raise ConfigError(
            f"--data {given} holds no file of a known kind: expected names that end in {known}; for other sources "
            "write the section yourself (evenpack config explain data.sources)"
        )
    for kind, members in kinds.items():
        name = _name_of(path, kind)
        yield FoundText(
            name=f"{name}_{kind}" if len(kinds) > 1 else name,
            kind=kind,
            path=_path_of(path, kind, members, is_all=len(members) == len(files)),
            files=members,
        )


def _files_at(path: Path) -> tuple[Path, ...]:
    if path.is_file():
        return (path,)
    if path.is_dir():
        return files_below(path)
    if path.exists() or not _GLOB_CHARACTERS.search(str(path)):
        problem = "is neither a file nor a folder" if path.exists() else "does not exist"
        raise ConfigError(f"--data: {path} {problem}: give the file, folder or pattern of the text")
    try:
        return find_files("text", path, suffixes=None)
    except DataError as error:
        raise ConfigError(f"--data: no file matches {path}: give the file, folder or pattern of the text") from error


def _path_of(path: Path, kind: str, members: Sequence[Path], *, is_all: bool) -> str | tuple[str, ...]:
    """Returns what leads to these files and to no others."""
    if is_all or (path.is_dir() and kind != "text"):  # the other kinds of source read only their own files of a folder
        return str(path)
    if not path.is_dir():
        return tuple(map(str, members))
    endings = [suffix for suffix in _ENDINGS[kind] if any(file.name.endswith(suffix) for file in members)]
    patterns = tuple(f"{escape(str(path))}/**/*{suffix}" for suffix in endings)
    return patterns[0] if len(patterns) == 1 else patterns


def _name_of(path: Path, kind: str) -> str:
    """Returns the name of a file without its ending, of a folder, or of the folder in which a pattern begins."""
    if path.is_file():
        return _name(next(path.name.removesuffix(end) for end in _ENDINGS[kind] if path.name.endswith(end)))
    plain = path
    while _GLOB_CHARACTERS.search(str(plain)) and not plain.exists():
        plain = plain.parent
    return _name(plain.resolve().name)


def _name(text: str) -> str:
    """Returns a valid name of a source."""
    return re.sub(r"[^A-Za-z0-9]+", "_", text).strip("_")[:_LONGEST_NAME] or "text"


def _with_unique_names(found: Sequence[FoundText]) -> Iterator[FoundText]:
    taken: set[str] = set()
    for text in found:
        name, count = text.name, 1
        while name in taken:
            count += 1
            name = f"{text.name}_{count}"
        taken.add(name)
        yield replace(text, name=name)


def _text_key(text: FoundText) -> str:
    """Returns `text` where there is such a key; else the only one that holds strings."""
    names = _keys_of_strings(text)
    if "text" in names:
        return "text"
    if len(names) == 1:
        return names[0]
    found = f"the keys {', '.join(names)}" if names else "no key"
    raise ConfigError(
        f"{_first(text.path)} has {found} with strings, and none is 'text': say with --text-key which one holds the "
        "documents"
    )


def _keys_of_strings(text: FoundText) -> list[str]:
    file = text.files[0]
    if text.kind == "jsonl":
        with SourceReader(file) as reader:
            line = next(reader.filled_lines(), None)
            values = {} if line is None else reader.json_object(line)
        return [name for name, value in values.items() if isinstance(value, str)]
    from evenpack.data.sources.tables import ParquetTable, is_text  # pyarrow takes a while to import

    return [name for name, type_ in ParquetTable(file).schema.items() if is_text(type_)]


def _first(path: str | tuple[str, ...]) -> str:
    return path if isinstance(path, str) else path[0]


def prepare_run(
    config: RunConfig,
    *,
    workers: Workers | None = None,
    tokenizer: Tokenizer | None = None,
) -> dict[Path, Manifest]:
    """Turns the run's text into tokens and packs, of each form that its stages need; prepared data is only verified.

    `workers` and `tokenizer` are as in `prepare`.

    Returns: the manifest of each folder, that of the first steps first.

    Raises: DataError or ConfigError for sources that cannot be read; KeyboardInterrupt, after which it can be resumed.
    """
    with Progress(console.messages(), interval_seconds=FREQUENT_LINES_SECONDS) as progress:
        try:
            found = {}
            for data in config.forms:
                folder = data.prepared_dir or config.prepared_dir
                found[folder] = prepare(data, folder, progress=progress, workers=workers, tokenizer=tokenizer)
            return found
        except KeyboardInterrupt:
            progress.note("interrupted; run the same command again to continue")
            raise


_READ = (
    Column("source"),
    Column("split"),
    Column("documents"),
    Column("sequences"),
    Column("tokens"),
    Column("cut", "tokens_cut"),
    Column("dropped", "tokens_dropped"),
)
_FILLED_UP = (Column("ends put", "subsequence_ends"), Column("tails padded", "tail_padding"))
_PACKED = (
    Column("packs"),
    Column("efficiency", lambda row: row["packing_efficiency"] if row["packs"] else None, ".2%"),
    Column("factor", lambda row: row["packing_factor"] if row["packs"] else None, ".3f"),
    Column("packed by", "packing_algorithm"),
)
_ROWS = (
    Column("source"),
    *(
        Column(heading.format(unit), f"{unit}_{key}", form)
        for unit in ("rows", "words")
        for heading, key, form in (
            ("{} read", "read", ""),
            ("{} dropped", "dropped", ""),
            ("% of {}", "dropped_share", ".2%"),
            ("{} kept", "kept", ""),
        )
    ),
)


def splits_table(rows: Sequence[Mapping[str, Any]], *, title: str) -> Table:
    """Returns `Manifest.summary` as a table."""
    fills_up = any(row["subsequence_ends"] or row["tail_padding"] for row in rows)
    return table_of(rows, [*_READ, *(_FILLED_UP if fills_up else ()), *_PACKED], title=title)


def rows_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Returns `Manifest.row_summary` as a table."""
    return table_of(rows, _ROWS, title="Rows and words before tokenising")
