"""Examples as sequences of tokens; those of a file of sentences, with their labels as numbers.

Shapes: N = sequences of a file, tokens = all of theirs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int64, Shaped

from evenpack.data.tasks.glue import GlueTask, TaskRow, read_task_rows
from evenpack.data.tokenizers.special_tokens import PairTokens
from evenpack.data.tokenizers.tokenizer import EncodedText, Tokenizer
from evenpack.errors import DataError


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenPair:
    """A sequence, including special tokens, in the halves that token types distinguish."""

    first: Int64[np.ndarray, " first"]
    second: Int64[np.ndarray, " second"]
    """The second half; empty if there is one sentence."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Features:
    """The sequences of a file, with the targets of each."""

    tokens: Int64[np.ndarray, " tokens"]
    """Tokens of all sequences, concatenated."""
    lengths: Int64[np.ndarray, " N"]
    first_lengths: Int64[np.ndarray, " N"]
    """Lengths of the first halves, which have token type 0."""
    labels: Shaped[np.ndarray, " N *parts"]
    """Targets: the class (int64), the score (float32), or the answer's first and last token (int64 [N, 2]) of each."""
    cut_sequences: int
    """Number of sequences that were cut because they were too long."""

    @property
    def starts(self) -> Int64[np.ndarray, " N"]:
        """Returns the start of each sequence among the tokens."""
        starts: Int64[np.ndarray, " N"] = np.cumsum(self.lengths) - self.lengths
        return starts

    @property
    def sequences(self) -> int:
        return len(self.lengths)


def features_of(pairs: Sequence[TokenPair], labels: Shaped[np.ndarray, " N *parts"], *, cut_sequences: int) -> Features:
    """Concatenates sequences. For `labels` see `Features`."""
    return Features(
        tokens=np.concatenate([part for pair in pairs for part in (pair.first, pair.second)]),
        lengths=np.array([len(pair.first) + len(pair.second) for pair in pairs], dtype=np.int64),
        first_lengths=np.array([len(pair.first) for pair in pairs], dtype=np.int64),
        labels=labels,
        cut_sequences=cut_sequences,
    )


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
    try:
        path.stat()
    except OSError as error:
        raise DataError(
            f"{path} cannot be opened: {error.strerror}; give the folder of the task's files as data.folder=FOLDER"
        ) from error
    sentences, labels = [], []
    for row in read_task_rows(path, task):
        sentences.append(_sentences(row, task))
        labels.append(_label(row, task))
    if not sentences:
        raise DataError(f"{path} has no row of data; expected one example per line")
    return SentenceExamples(sentences=tuple(sentences), labels=tuple(labels))


def sentence_features(
    examples: SentenceExamples, task: GlueTask, tokenizer: Tokenizer, *, max_sequence_length: int
) -> Features:
    """Makes [CLS] A [SEP], or [CLS] A [SEP] B [SEP].

    The longer sentence of one that is too long loses its last tokens.
    """
    columns = [tokenizer.encode_texts(texts) for texts in zip(*examples.sentences, strict=True)]
    special = tokenizer.pair_tokens
    room = max_sequence_length - 1 - len(columns)
    pairs, cut = [], 0
    for parts in zip(*columns, strict=True):
        kept = _fitting([len(part.tokens) for part in parts], room)
        cut += sum(kept) < sum(len(part.tokens) for part in parts)
        pairs.append(_pair(parts, kept, special))
    labels = np.array(examples.labels, dtype=np.int64 if task.labels else np.float32)
    return features_of(pairs, labels, cut_sequences=cut)


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
