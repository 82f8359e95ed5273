"""Reads sequence lengths in many formats into a histogram.

wikipedia_512             a published histogram, of `published_names`
histogram.json            [n1, n2, ...] counts the sequences of length 1, 2, ...; {"17": n, ...} by length;
                          {"name": either, ...} several; one is chosen
lengths.npy               one integer for each sequence, memory-mapped; or a histogram, if the options say so
lengths.txt, or -         integers separated by spaces or lines (standard input for -); or a histogram
*.parquet, .csv, .tsv,    a column of integers, of lists (each has its length), or of text, which a tokenizer measures;
*.jsonl[.zst|.gz],        two columns of text are a pair
*.arrow, .feather
FOLDER, NAME[:SUBSET]     the same of a dataset: a local folder, also one of save_to_disk, or of the hub; `glue:cola`
                          knows its columns
glue:cola                 without options: the shipped histogram (cola, sst2, rte, wnli); with a folder
                          of GLUE's own files and a tokenizer: the lengths of any of the nine tasks

    read_histogram -> numbers.py: bare numbers and histograms
                   -> rows.py: columns of files and datasets
"""

import json
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from evenpack.data.packing import LengthHistogram
from evenpack.data.prepare.progress import NoProgress, Progress
from evenpack.data.sources.files import ARROW_SUFFIXES, saved_splits
from evenpack.data.sources.lines import JSONL_SUFFIXES
from evenpack.errors import ConfigError, DataError
from evenpack.studies.lengths import numbers
from evenpack.studies.lengths.options import InputOptions

if TYPE_CHECKING:
    from evenpack.data.sources.tables import Table

GLUE = "glue:"
"""Prefix of the name of a task of GLUE."""

_TABLE_SUFFIXES = (".parquet", *ARROW_SUFFIXES, ".csv", ".tsv", *JSONL_SUFFIXES)
_FILE_SUFFIXES = (".npy", ".npz", ".json", ".txt", *_TABLE_SUFFIXES)


def read_histogram(
    source: str, options: InputOptions | None = None, *, progress: Progress | None = None
) -> LengthHistogram:
    """Counts the lengths of `source`; `progress` reports the tokenisation of text.

    Raises: ConfigError for options that do not apply to such a source, or are missing; DataError with the position of
    an error.
    """
    options = options or InputOptions()
    path = Path(source).expanduser()
    if source in published_names() and not (source.startswith(GLUE) and options.of_texts):
        options.refuse_all_but(source=source, what="a published histogram")
        return published_histogram(source)
    if options.glue_dir is not None:
        return _read_glue(source, options, progress or NoProgress())
    if _names_dataset(source, path, options):
        return _read_dataset(source, options, progress or NoProgress())
    try:
        if source.endswith(_TABLE_SUFFIXES):
            return _read_table(path, options, progress or NoProgress())
        return _read_numbers(source, path, options)
    except OSError as error:
        raise DataError(
            f"{source} cannot be read: {error.strerror}; published histograms: {', '.join(published_names())}. "
            "A dataset of the hub needs a --tokenizer or --column"
        ) from error


def merge_histograms(histograms: list[LengthHistogram]) -> LengthHistogram:
    """Returns the histogram of all their sequences together."""
    counts = np.zeros(max(len(histogram.counts) for histogram in histograms), dtype=np.int64)
    for histogram in histograms:
        counts[: len(histogram.counts)] += histogram.counts
    return LengthHistogram(counts=counts)


def _names_dataset(source: str, path: Path, options: InputOptions) -> bool:
    """Returns whether a source is a dataset: a folder, or no file with options that only datasets need."""
    if path.exists() or source == "-":
        return path.is_dir()
    needs_dataset = ":" in source or options.tokenizer or options.column or options.split
    return bool(needs_dataset) and not source.endswith(_FILE_SUFFIXES)


def _read_numbers(source: str, path: Path, options: InputOptions) -> LengthHistogram:
    if path.suffix == ".json":
        options.refuse_all_but("name", source=source, what="a file of histograms")
        return numbers.from_json(path, options.name)
    if path.suffix == ".npz":
        raise DataError(f"{source} may hold several arrays (.npz): save the lengths alone with numpy.save, as .npy")
    options.refuse_all_but("histogram", source=source, what="a list of bare numbers")
    if path.suffix == ".npy":
        return numbers.from_array(path, are_counts=options.histogram)
    if source == "-":
        return numbers.from_text(sys.stdin.buffer.read, "standard input", are_counts=options.histogram)
    with path.open("rb") as file:
        return numbers.from_text(file.read, source, are_counts=options.histogram)


def _read_table(path: Path, options: InputOptions, progress: Progress) -> LengthHistogram:
    options.refuse_all_but("column", "tokenizer", source=str(path), what="a file of columns")
    from evenpack.studies.lengths.rows import count_table

    return count_table(_open_table(path), options, progress)


def _open_table(path: Path) -> "Table":
    from evenpack.data.sources.tables import ArrowTable, CsvTable, JsonlTable, ParquetTable

    if path.name.endswith(JSONL_SUFFIXES):
        return JsonlTable(path)
    if path.name.endswith(ARROW_SUFFIXES):
        return ArrowTable(path)
    return ParquetTable(path) if path.suffix == ".parquet" else CsvTable(path)


def _read_glue(source: str, options: InputOptions, progress: Progress) -> LengthHistogram:
    if not source.startswith(GLUE):
        raise ConfigError(f"--glue-dir does not apply to {source}: it holds the files of a task, glue:TASK")
    options.refuse_all_but("glue_dir", "tokenizer", "split", source=source, what="a task of GLUE in files of its own")
    from evenpack.studies.lengths.rows import GlueTable, count_table

    table = GlueTable(source.removeprefix(GLUE), Path(str(options.glue_dir)), options.split or "train")
    if options.tokenizer is None:
        raise _no_tokenizer(source, table.texts)
    return count_table(table, options, progress, known_columns=table.texts)


def _read_dataset(source: str, options: InputOptions, progress: Progress) -> LengthHistogram:
    options.refuse_all_but("column", "tokenizer", "split", source=source, what="a dataset")
    from evenpack.studies.lengths.rows import DatasetTable, SavedTable, count_table, known_columns

    folder = Path(source).expanduser()
    if saved_splits(folder) is not None:
        return count_table(SavedTable(folder, options.split), options, progress)
    known = known_columns(source)
    if known and options.tokenizer is None and options.column is None:
        raise _no_tokenizer(source, known)
    return count_table(DatasetTable(source, options.split), options, progress, known_columns=known)


def _no_tokenizer(source: str, texts: Sequence[str]) -> ConfigError:
    shipped = ", ".join(name for name in published_names() if name.startswith(GLUE))
    return ConfigError(
        f"the lengths of {source} are the lengths of its texts ({', '.join(texts)}): they need --tokenizer "
        f"NAME or FOLDER. The lengths of the training sets of {shipped} are shipped: give no option"
    )


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
