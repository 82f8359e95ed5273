"""Reads sequence lengths in many formats into a histogram.

wikipedia_512             a published histogram, of `published_names`
histogram.json            [n1, n2, ...] counts the sequences of length 1, 2, ...; {"17": n, ...} by length;
                          {"name": either, ...} several; one is chosen
lengths.npy               one integer for each sequence, memory-mapped; or a histogram, if the options say so
lengths.txt, or -         integers separated by spaces or lines (standard input for -); or a histogram
*.parquet, .csv, .tsv,    a column of integers, of lists (each has its length), or of text, which a tokenizer measures;
*.jsonl[.zst|.gz]         two columns of text are a pair
glue:cola                 without options: the shipped histogram (cola, sst2, rte, wnli); with a folder
                          of GLUE's own files and a tokenizer: the lengths of any of the nine tasks

Bare numbers and histograms are read here, columns of files in rows.py.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from jaxtyping import Int64
from pydantic import Field, TypeAdapter, ValidationError

from evenpack import console
from evenpack.config import nearest
from evenpack.data.limits import MOST_SLOTS
from evenpack.data.packing import LengthHistogram
from evenpack.data.packing.histogram import MOST_SEQUENCES
from evenpack.data.sequences import SequenceView, length_chunks
from evenpack.data.sources.lines import JSONL_SUFFIXES
from evenpack.data.tasks.glue import find_glue_task
from evenpack.errors import ConfigError, DataError, PackingError
from evenpack.files import expand_user
from evenpack.progress import Progress
from evenpack.studies.lengths.counter import LengthCounter
from evenpack.studies.lengths.options import SubjectOptions

ReadLines = Callable[[int], list[bytes]]
"""The `readlines` of a binary file: lines of about so many bytes together, then none."""
_TEXT_BYTES = 1 << 20
"""Bytes of lines parsed together."""
_ARRAY_NUMBERS = 1 << 20
"""Numbers of a mapped array counted together."""
_NUMBER = re.compile(rb"-?[0-9]{1,18}")
_FORM = '[n1, n2, ...] or {"17": n, ...}'
_COUNTS = TypeAdapter(
    dict[
        Annotated[int, Field(ge=1, le=MOST_SLOTS)],
        Annotated[int, Field(strict=True, ge=0, le=MOST_SEQUENCES)],
    ]
)


def from_array(path: Path, *, are_counts: bool) -> LengthHistogram:
    """Reads a .npy file, memory-mapped.

    Raises: DataError if it holds no list of integers; names the index of a wrong one.
    """
    array = _load_array(path)
    parts = (array[start : start + _ARRAY_NUMBERS] for start in range(0, len(array), _ARRAY_NUMBERS))
    return _histogram(parts, str(path), are_counts=are_counts)


def from_text(readlines: ReadLines, origin: str, *, are_counts: bool) -> LengthHistogram:
    """Reads integers between white space. Raises: DataError with the position of one that is invalid, or no length."""
    return _histogram(_parse_parts(readlines, origin), origin, are_counts=are_counts)


def _histogram(parts: Iterable[np.ndarray], origin: str, *, are_counts: bool) -> LengthHistogram:
    """Counts the lengths in parts of a list, or joins the parts if they are counts."""
    if are_counts:
        counts: list[np.ndarray] = []
        for part in parts:
            counts.append(part)
            if sum(map(len, counts)) > MOST_SLOTS:
                raise DataError(
                    f"{origin} holds more than {MOST_SLOTS} numbers: too many for a histogram, whose last one is the "
                    "longest length; if they are lengths leave --histogram out"
                )
        try:
            return LengthHistogram.from_counts(np.concatenate(counts or [np.zeros(0, dtype=np.int64)]))
        except PackingError as error:
            raise DataError(f"{origin}: {error}") from error
    counter = LengthCounter()
    for part in parts:
        counter.add(part, _index_namer(origin, counter.sequences))
    return counter.histogram(origin)


def _index_namer(origin: str, first: int) -> Callable[[int], str]:
    return lambda index: f"{origin}, index {first + index}"


def _load_array(path: Path) -> np.ndarray:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise DataError(f"{path} is not an .npy file of numbers: {error}") from error
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in "iu":
        found = f"{array.dtype} of shape {array.shape}" if isinstance(array, np.ndarray) else "several arrays"
        raise DataError(f"{path}: expected one integer for each sequence (or length, of a histogram), found {found}")
    return array


def _parse_parts(readlines: ReadLines, origin: str) -> Iterator[Int64[np.ndarray, " part"]]:
    """Yields the integers of some lines at a time. Raises: DataError for a word that is none, with its line."""
    lines_before = 0
    for lines in iter(lambda: readlines(_TEXT_BYTES), []):
        words = b"".join(lines).split()
        if not all(map(_NUMBER.fullmatch, words)):
            number, wrong = next(
                (number, word)
                for number, line in enumerate(lines, lines_before + 1)
                for word in line.split()
                if not _NUMBER.fullmatch(word)
            )
            shown = wrong[:40].decode(errors="replace")
            raise DataError(f"{origin}, line {number}: expected whole numbers, found {shown!r}")
        yield np.array(words, dtype=np.bytes_).astype(np.int64)
        lines_before += len(lines)


def from_json(path: Path, name: str | None) -> LengthHistogram:
    """Reads the histogram in a file, or the one of this name.

    Raises: DataError with the error in the file, and its position.
    """
    values, origin = _load(path), str(path)
    if isinstance(values, dict) and any(isinstance(inner, list | dict) for inner in values.values()):
        values, origin = _chosen(values, name, path)
    elif name is not None:
        raise DataError(f"{path} is a single histogram and has none named '{name}'")
    if not isinstance(values, list | dict) or not values:
        raise DataError(f"{origin}: expected counts by length ({_FORM}), or several of them by name")
    counts = _counts_by_length(dict(enumerate(values, 1)) if isinstance(values, list) else values, origin)
    try:
        return LengthHistogram(counts=counts)
    except PackingError as error:
        raise DataError(f"{origin}: {error}") from error


def _load(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=partial(_refuse_repeats, str(path)))
    except RecursionError as error:
        raise DataError(f"{path}: expected {_FORM}, found brackets nested too deep to be read") from error
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}") from error


def _refuse_repeats(origin: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise DataError(
                f"{origin}: {_json(key)} occurs twice in one object, with {_json(values[key])} and {_json(value)}"
            )
        values[key] = value
    return values


def _chosen(values: dict[str, Any], name: str | None, path: Path) -> tuple[Any, str]:
    """Returns one of several histograms, and its origin."""
    wrong = [key for key, inner in values.items() if not isinstance(inner, list | dict)]
    if wrong:
        raise DataError(f"{path}, {wrong[0]}: expected counts by length ({_FORM}), found {_json(values[wrong[0]])}")
    if name is None:
        raise DataError(f"{path} holds several histograms: choose one with --name; known: {', '.join(values)}")
    if name not in values:
        raise DataError(f"{path} has no histogram named '{name}'; {nearest(name, list(values))}")
    return values[name], f"{path}, {name}"


def _counts_by_length(values: dict[Any, Any], origin: str) -> Int64[np.ndarray, " longest"]:
    try:
        by_length = _COUNTS.validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        raise DataError(
            f"{origin}: expected a number of sequences by length; at {first['loc'][0]!s:.40}: {first['msg']}, found "
            f"{_json(first['input'])}"
        ) from error
    if len(by_length) < len(values):
        raise DataError(f"{origin}: a length occurs twice, as 7 and 07 would")
    counts = np.zeros(max(by_length), dtype=np.int64)
    counts[np.array(list(by_length)) - 1] = list(by_length.values())
    return counts


def _json(value: Any) -> str:
    """Returns a value in its JSON form, if it is short."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    return f"{json.dumps(value):.40}"


GLUE = "glue:"
"""Prefix of the name of a task of GLUE."""

_TABLE_SUFFIXES = (".parquet", ".csv", ".tsv", *JSONL_SUFFIXES)


def read_histogram(
    source: str, options: SubjectOptions | None = None, *, progress: Progress | None = None
) -> LengthHistogram:
    """Counts the lengths of `source`; `progress` shows the tokenisation of text.

    Raises: ConfigError for options that do not apply to such a source, or are missing; DataError with the position of
    an error.
    """
    options = options or SubjectOptions()
    progress = progress or Progress(console.messages(), silent=True)
    path = expand_user(source)
    if source in published_names() and options.glue_dir is None:
        options.refuse_all_but(source=source, what="a published histogram")
        return published_histogram(source)
    if source.startswith(GLUE) or options.glue_dir is not None:
        return _read_glue(source, options, progress)
    if path.is_dir():
        raise DataError(
            f"{source} is a folder: of prepared data give the run file (.yaml), of a dataset a file with the column "
            "(Dataset.to_parquet)"
        )
    try:
        if source.endswith(_TABLE_SUFFIXES):
            return _read_table(path, options, progress)
        return _read_numbers(source, path, options)
    except OSError as error:
        raise DataError(
            f"{source} cannot be read: {error.strerror}; published histograms: {', '.join(published_names())}"
        ) from error


def lengths_of(views: Sequence[SequenceView]) -> LengthHistogram:
    """Counts the sequences of all views together."""
    chunks = chain.from_iterable(length_chunks(view) for view in views)
    return LengthHistogram.from_chunks(chunks, longest=max(view.max_sequence_length for view in views))


def _read_numbers(source: str, path: Path, options: SubjectOptions) -> LengthHistogram:
    if path.suffix == ".json":
        options.refuse_all_but("name", source=source, what="a file of histograms")
        return from_json(path, options.name)
    if path.suffix == ".npz":
        raise DataError(f"{source} may hold several arrays (.npz): save the lengths alone with numpy.save, as .npy")
    options.refuse_all_but("histogram", source=source, what=f"no file of columns ({', '.join(_TABLE_SUFFIXES)})")
    if path.suffix == ".npy":
        return from_array(path, are_counts=options.histogram)
    if source == "-":
        return from_text(sys.stdin.buffer.readlines, "standard input", are_counts=options.histogram)
    with path.open("rb") as file:
        return from_text(file.readlines, source, are_counts=options.histogram)


def _read_table(path: Path, options: SubjectOptions, progress: Progress) -> LengthHistogram:
    options.refuse_all_but("column", "tokenizer", source=str(path), what="a file of columns")
    from evenpack.data.sources.tables import ParquetTable, StreamedTable
    from evenpack.studies.lengths.rows import count_table

    return count_table(ParquetTable(path) if path.suffix == ".parquet" else StreamedTable(path), options, progress)


def _read_glue(source: str, options: SubjectOptions, progress: Progress) -> LengthHistogram:
    if not source.startswith(GLUE):
        raise ConfigError(f"--glue-dir does not apply to {source}: it holds the files of a task, glue:TASK")
    options.refuse_all_but("glue_dir", "tokenizer", source=source, what="a task of GLUE in files of its own")
    from evenpack.studies.lengths.rows import count_glue

    task = find_glue_task(source.removeprefix(GLUE))
    if options.glue_dir is None or options.tokenizer is None:
        shipped = ", ".join(name for name in published_names() if name.startswith(GLUE))
        raise ConfigError(
            f"the lengths of {source} are the lengths of its texts ({', '.join(task.texts)}): they need --glue-dir "
            f"FOLDER and --tokenizer NAME or FOLDER. Those of {shipped} are shipped: give no option"
        )
    return count_glue(task, Path(options.glue_dir), options.tokenizer, progress)


_PUBLISHED = ("published_histograms.json", "glue_histograms.json")
"""The length histograms of "Efficient Sequence Packing without Cross-contamination" (PackedBERT, appendix): English
Wikipedia cut for BERT at five lengths, and the question-context pairs of SQuAD 1.1 at 384, with misprinted bins
corrected so that the totals of the paper hold; and the training sets of four tasks of GLUE, counted with BERT's uncased
vocabulary (special tokens included, nothing cut), of which the paper prints no bins: at 128 they give its table 6."""


def published_names() -> tuple[str, ...]:
    """Returns the names that `published_histogram` knows."""
    return tuple(_counts())


def published_histogram(name: str) -> LengthHistogram:
    """Returns the histogram of that name. Raises: KeyError for another name."""
    return LengthHistogram(counts=np.array(_counts()[name], dtype=np.int64))


@cache
def _counts() -> dict[str, list[int]]:
    counts: dict[str, list[int]] = {}
    for name in _PUBLISHED:
        counts |= json.loads(Path(__file__).with_name(name).read_text())
    return counts
