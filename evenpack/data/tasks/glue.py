"""The tasks of GLUE with training data: the content of their files, the columns of a sequence, and the predictions.

Their files are tab-separated, one row a line, without quoting.

Sources: Wang et al. 2019 (GLUE), table 1; the files that gluebenchmark.com distributes; the "glue" data set of the hub
(`nyu-mll/glue`).
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from evenpack.config import nearest
from evenpack.data.sources.lines import SourceReader
from evenpack.errors import ConfigError, DataError
from evenpack.files import expand_user

log = logging.getLogger(__name__)
_REMEDY = "use the file as the benchmark distributes it"


@dataclass(frozen=True)
class GlueTask:
    """One task: a sequence is [CLS] A [SEP], or [CLS] A [SEP] B [SEP] where there are two texts."""

    folder: str
    """The benchmark's name of the task and of the folder that holds `train.tsv` and the files of the other splits."""
    texts: tuple[str, ...]
    """The columns of A, or of A and B."""
    label: str
    """The column to predict."""
    labels: tuple[str, ...]
    """The classes by their names in the label column, in the order of their numbers; empty where the label is a
    number."""
    validation_files: tuple[str, ...] = ("dev.tsv",)
    """Names of the validation files in the task's folder."""
    columns: tuple[str, ...] | None = None
    """The columns of training and validation files, which have no header row; None: the first row names them."""
    has_cut_rows: bool = False
    """Whether the official training file has rows that end too early (github.com/nyu-mll/GLUE-baselines, issue 5).
    They are left out with a warning, as in the hub's data set."""

    training_file = "train.tsv"
    """Name of the training file in the task's folder."""


_SENTENCES = ("sentence1", "sentence2")
_COLA = ("source", "label", "mark", "sentence")
_DEV = ("dev_matched.tsv", "dev_mismatched.tsv")
_OF_MNLI = ("entailment", "neutral", "contradiction")
_OF_RTE = ("entailment", "not_entailment")
_01 = ("0", "1")

GLUE_TASKS: Mapping[str, GlueTask] = MappingProxyType(
    {
        "cola": GlueTask("CoLA", ("sentence",), "label", _01, columns=_COLA),
        "sst2": GlueTask("SST-2", ("sentence",), "label", _01),
        "mrpc": GlueTask("MRPC", ("#1 String", "#2 String"), "Quality", _01),
        "qqp": GlueTask("QQP", ("question1", "question2"), "is_duplicate", _01, has_cut_rows=True),
        "stsb": GlueTask("STS-B", _SENTENCES, "score", ()),
        "mnli": GlueTask("MNLI", _SENTENCES, "gold_label", _OF_MNLI, validation_files=_DEV),
        "qnli": GlueTask("QNLI", ("question", "sentence"), "label", _OF_RTE),
        "rte": GlueTask("RTE", _SENTENCES, "label", _OF_RTE),
        "wnli": GlueTask("WNLI", _SENTENCES, "label", _01),
    }
)
"""The tasks by the names that the hub has for them."""


def find_glue_task(name: str) -> GlueTask:
    """Returns the task of that name. Raises: ConfigError for an unknown one, listing the known ones."""
    if name not in GLUE_TASKS:
        raise ConfigError(f"'{name}' is not a task of GLUE; {nearest(name, list(GLUE_TASKS))}; give glue:TASK")
    return GLUE_TASKS[name]


def training_file(directory: Path, task: GlueTask) -> Path:
    """Returns the training file of a task among task folders in `directory`. Raises: DataError if it is missing."""
    path = expand_user(directory) / task.folder / task.training_file
    if not path.is_file():
        raise DataError(f"{path} is not there: give the folder that holds GLUE's task folders ({task.folder}, ...)")
    return path


@dataclass(frozen=True, kw_only=True)
class TaskRow:
    """One example of a file."""

    texts: tuple[str, ...]
    """The text A, or A and B."""
    label: str
    """The label as in the file, not yet compared with the task's classes."""
    where: str
    """File and line, for messages."""
    bytes_read: int
    """Bytes read of the file, including this row and any read ahead."""


def read_task_rows(path: Path, task: GlueTask) -> Iterator[TaskRow]:
    """Yields every example of a training or validation file, in order. Empty lines are not rows.

    Raises: DataError naming file and line for a header row without the task's columns, for a row of another number of
    columns (where the task `has_cut_rows`, rows of too few are left out and counted in a warning), and for text that is
    not UTF-8; naming the file where it cannot be opened or lacks its header row.
    """
    with SourceReader(path) as reader:
        rows = _rows_of_cells(reader)
        columns = task.columns or next(rows, None)
        if columns is None:
            raise DataError(f"{path} is empty: expected a header row that names the columns")
        places = [_column_number(columns, name, reader.where) for name in (*task.texts, task.label)]
        cut_rows = 0
        for cells in rows:
            if task.has_cut_rows and len(cells) < len(columns):
                cut_rows += 1
                continue
            if len(cells) != len(columns):
                raise DataError(
                    f"{reader.where}: expected {len(columns)} columns between tabs ({', '.join(columns)}), found "
                    f"{len(cells)}, the first of them {cells[0]!r:.60}; {_REMEDY}"
                )
            *texts, label = (cells[place] for place in places)
            yield TaskRow(texts=tuple(texts), label=label, where=reader.where, bytes_read=reader.bytes_read)
    if cut_rows:
        log.warning("%s: left out %d rows that end too early", path, cut_rows)


def _rows_of_cells(reader: SourceReader) -> Iterator[list[str]]:
    for line in reader.lines():
        if text := reader.decode(line).rstrip("\r\n"):
            yield text.split("\t")


def _column_number(columns: Sequence[str], name: str, where: str) -> int:
    if name not in columns:
        raise DataError(
            f"{where}: expected a header row with a column '{name}', found {', '.join(columns):.200}; {_REMEDY}"
        )
    return columns.index(name)
