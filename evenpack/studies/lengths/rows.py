"""Rows whose columns have lengths: integers are lengths, lists have one, texts get one by a tokenizer."""

import logging
from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow.compute as pc
from pyarrow import types

from evenpack.config import nearest
from evenpack.data.packing import LengthHistogram
from evenpack.data.sources.tables import LONG_ROWS_AT_ONCE, Rows, Table, is_text
from evenpack.data.tasks.glue import GlueTask, TaskRow, read_task_rows, training_file
from evenpack.data.tokenizers.loading import TokenCounter, load_token_counter
from evenpack.errors import ConfigError, DataError
from evenpack.progress import Progress
from evenpack.studies.lengths.counter import LengthCounter
from evenpack.studies.lengths.options import SubjectOptions

Kind = Literal["number", "list", "text", "other"]
log = logging.getLogger(__name__)


def count_glue(task: GlueTask, directory: Path, tokenizer: str, progress: Progress) -> LengthHistogram:
    """Counts the lengths of a task's training set, in a folder of task folders.

    Raises: DataError for a missing file and for a row of another form, with its line.
    """
    path = training_file(directory, task)
    token_counter, counter = load_token_counter(tokenizer), LengthCounter()
    shown = progress.begin(f"{path}: tokenising", unit="bytes")
    rows, total_bytes = read_task_rows(path, task), path.stat().st_size
    while some := list(islice(rows, LONG_ROWS_AT_ONCE)):
        texts: list[Any] = [row.texts[0] if len(row.texts) == 1 else row.texts for row in some]
        counter.add(token_counter.lengths(texts), partial(_place, some))
        counts = {"documents": counter.sequences, "tokens": counter.tokens}
        shown.update(some[-1].bytes_read, total_bytes, counts=counts)
    return counter.histogram(str(path))


def _place(rows: Sequence[TaskRow], index: int) -> str:
    return rows[index].where


def count_table(table: Table, options: SubjectOptions, progress: Progress) -> LengthHistogram:
    """Counts the lengths of a table's rows.

    Raises: ConfigError for options that do not suit the columns; DataError for a missing column and for a value that is
    no length, with its row.
    """
    columns = _choose(table, options)
    token_counter = None if options.tokenizer is None else load_token_counter(options.tokenizer)
    counter = LengthCounter()
    shown = progress.begin(f"{table.origin}: tokenising", unit="bytes")
    for rows in table.rows(columns):
        _refuse_nulls(rows, columns)
        counter.add(_lengths(rows, token_counter), rows.place)
        if token_counter is not None:
            counts = {"documents": counter.sequences, "tokens": counter.tokens}
            shown.update(rows.bytes_read, table.total_bytes, counts=counts)
    return counter.histogram(table.origin)


def _choose(table: Table, options: SubjectOptions) -> tuple[str, ...]:
    with_text = options.tokenizer is not None
    if options.column is not None:
        columns = _named(table, options.column)
    else:
        columns = (_only_candidate(table, with_text=with_text),)
        log.info("%s: using column '%s' (%s)", table.origin, columns[0], table.schema[columns[0]])
    for name in columns:
        _check_kind(table, name, with_text=with_text)
    if len(columns) > 2 or (len(columns) == 2 and not with_text):
        raise ConfigError(f"--column {','.join(columns)}: two columns are the texts of a pair, which needs --tokenizer")
    if len(set(columns)) < len(columns):
        raise ConfigError(f"--column {','.join(columns)} names a column twice; a pair has the texts of two columns")
    return columns


def _named(table: Table, given: str) -> tuple[str, ...]:
    columns = (given,) if given in table.schema else tuple(given.split(","))
    for name in columns:
        if name not in table.schema:
            raise DataError(
                f"{table.origin} has no column '{name}'; {nearest(name, list(table.schema))}. Choose with --column"
            )
    return columns


def _only_candidate(table: Table, *, with_text: bool) -> str:
    if with_text and "text" in table.schema:
        return "text"
    wanted = ("text",) if with_text else ("number", "list")
    found = [name for name, type_ in table.schema.items() if _kind(type_) in wanted and not types.is_floating(type_)]
    if len(found) != 1:
        columns = ", ".join(f"{name} ({type_})" for name, type_ in table.schema.items())
        expected = "text" if with_text else "integers or lists (for one of text give --tokenizer too)"
        raise DataError(
            f"{table.origin} has {len(found)} columns of {expected}: choose one with --column; columns: {columns}"
        )
    return found[0]


def _check_kind(table: Table, name: str, *, with_text: bool) -> None:
    type_ = table.schema[name]
    kind = _kind(type_)
    if kind == "text" and not with_text:
        raise ConfigError(
            f"column '{name}' of {table.origin} is text ({type_}): its lengths need --tokenizer NAME or FOLDER"
        )
    if kind in ("number", "list") and with_text:
        raise ConfigError(
            f"--tokenizer makes lengths of text, but column '{name}' of {table.origin} is {type_}: choose a column of "
            "text, or leave --tokenizer out"
        )
    if kind == "other" and not types.is_null(type_):  # of nulls alone: reading names the row
        raise DataError(
            f"column '{name}' of {table.origin} is {type_}: expected integers, lists of no further lists, or text "
            "with a --tokenizer"
        )


def _is_list(type_: Any) -> bool:
    return bool(types.is_list(type_) or types.is_large_list(type_) or types.is_fixed_size_list(type_))


def _kind(type_: Any) -> Kind:
    if types.is_dictionary(type_):
        return _kind(type_.value_type)
    if types.is_integer(type_) or types.is_floating(type_):
        return "number"
    if _is_list(type_):
        return "other" if _is_list(type_.value_type) else "list"  # of a batch, which is no length of a text
    return "text" if is_text(type_) else "other"


def _refuse_nulls(rows: Rows, columns: Sequence[str]) -> None:
    for name, values in zip(columns, rows.columns, strict=True):
        if values.null_count:
            index = pc.index(pc.is_null(values), True).as_py()
            raise DataError(f"{rows.place(index)}: '{name}' is null; each row must have a length")


def _lengths(rows: Rows, token_counter: TokenCounter | None) -> np.ndarray:
    """Returns the length of each row."""
    if token_counter is not None:
        texts = [values.to_pylist() for values in rows.columns]
        return token_counter.lengths(texts[0] if len(texts) == 1 else list(zip(*texts, strict=True)))
    values = rows.columns[0]
    if _kind(values.type) == "list":
        values = pc.list_value_length(values)
    return np.asarray(values.to_numpy(zero_copy_only=False))
