"""The rows of a file of sentences as sequences of tokens, with their labels as numbers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from evenpack.data.sequences.labelled import LabelledSequences, TokenPair
from evenpack.data.tasks.glue import GlueTask, TaskRow, read_task_rows
from evenpack.data.tokenizers.special_tokens import PairTokens
from evenpack.data.tokenizers.tokenizer import EncodedText, Tokenizer
from evenpack.errors import DataError
from evenpack.files import explained


@dataclass(frozen=True, kw_only=True)
class SentenceExamples:
    """A file's rows, in its order."""

    sentences: tuple[tuple[str, ...], ...]
    """One text for each of the task's columns, for each row."""
    labels: tuple[float, ...]
    """Number of the row's label among the task's, or its score."""


def read_sentences(path: Path, task: GlueTask) -> SentenceExamples:
    """Reads the rows of a file.

    Raises: DataError that names file and line for an error of `read_task_rows`, an empty sentence, or an unknown label;
    that names the file if it is missing or has no rows.
    """
    with explained(path, DataError, then="give the folder of the task's files as data.folder=FOLDER", missing=True):
        path.stat()
    sentences, labels = [], []
    for row in read_task_rows(path, task):
        sentences.append(_sentences(row, task))
        labels.append(_label(row, task))
    if not sentences:
        raise DataError(f"{path} has no row of data; expected one example per line")
    return SentenceExamples(sentences=tuple(sentences), labels=tuple(labels))


def sentence_sequences(
    examples: SentenceExamples, task: GlueTask, tokenizer: Tokenizer, *, max_sequence_length: int
) -> LabelledSequences:
    """Makes [CLS] A [SEP], or [CLS] A [SEP] B [SEP].

    The longer sentence of one that is too long loses its last tokens.
    """
    columns = [tokenizer.encode_texts(texts) for texts in zip(*examples.sentences, strict=True)]
    special = tokenizer.pair_tokens
    room = max_sequence_length - 1 - len(columns)
    pairs = []
    for parts in zip(*columns, strict=True):
        kept = _fitting([len(part.tokens) for part in parts], room)
        pairs.append(_pair(parts, kept, special))
    labels = np.array(examples.labels, dtype=np.int64 if task.labels else np.float32)
    return LabelledSequences.of(pairs, labels, max_sequence_length=max_sequence_length)


def _pair(parts: Sequence[EncodedText], kept: Sequence[int], special: PairTokens) -> TokenPair:
    pieces = [np.append(part.tokens[:count], special.separator_id) for part, count in zip(parts, kept, strict=True)]
    first = np.append(special.classification_id, pieces[0])
    return TokenPair(first=first, second=pieces[1] if len(pieces) > 1 else np.empty(0, dtype=np.int64))


def _fitting(lengths: Sequence[int], room: int) -> list[int]:
    """Returns the tokens kept of each text: while they do not fit, the longer, or else the second, loses one."""
    if len(lengths) == 1:
        return [min(lengths[0], room)]
    first, second = lengths
    half = room // 2
    if first <= half:
        return [first, min(second, room - first)]
    if second <= half:
        return [min(first, room - second), second]
    return [first, second] if first + second <= room else [room - half, half]


def _sentences(row: TaskRow, task: GlueTask) -> tuple[str, ...]:
    texts = tuple(text.strip() for text in row.texts)
    for name, text in zip(task.texts, texts, strict=True):
        if not text:
            raise DataError(f"{row.where}: column '{name}' is empty, and the task needs a sentence there")
    return texts


def _label(row: TaskRow, task: GlueTask) -> float:
    text = row.label.strip()
    if task.labels:
        if text not in task.labels:
            raise DataError(
                f"{row.where}: expected a label of {task.folder} ({', '.join(task.labels)}), found {text!r}"
            )
        return float(task.labels.index(text))
    try:
        score = float(text)
    except ValueError:
        score = math.nan
    if not math.isfinite(score):
        raise DataError(f"{row.where}: expected a number in column '{task.label}', found {text!r}")
    return score
