"""Tab-separated files of sentences and labels, and sentences as sequences."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from evenpack.data.tokenizers.tokenizer import EncodedText, PairTokens, Tokenizer
from evenpack.errors import DataError
from evenpack.finetuning.features import Features, TokenPair, features_of
from evenpack.finetuning.tasks import SentenceTask


@dataclass(frozen=True, kw_only=True)
class SentenceExamples:
    """A file's rows, in its order."""

    sentences: tuple[tuple[str, ...], ...]
    """One text for each of the task's columns, of each row."""
    labels: tuple[float, ...]
    """Number of the row's label among the task's, or its score."""


def read_sentences(path: Path, task: SentenceTask) -> SentenceExamples:
    """The rows of a file.

    Raises: DataError that names file and line for a file that is missing, not UTF-8 or without rows, a row of another
    number of columns, an empty sentence, or a label that is none of the task's.
    """
    lines = _lines(path)
    header = task.columns
    if header is None:
        header = tuple(next(lines, (0, ""))[1].split("\t"))
    places = [_place(path, header, name) for name in (*task.sentences, task.label)]
    sentences, labels = [], []
    for number, line in lines:
        fields = line.split("\t")
        origin = f"{path}, line {number}"
        if len(fields) != len(header):
            raise DataError(f"{origin}: expected {len(header)} columns ({', '.join(header)}), found {len(fields)}")
        texts = tuple(fields[place].strip() for place in places[:-1])
        for name, text in zip(task.sentences, texts, strict=True):
            if not text:
                raise DataError(f"{origin}: column '{name}' is empty, and the task needs a sentence there")
        sentences.append(texts)
        labels.append(_label(fields[places[-1]].strip(), task, origin))
    if not sentences:
        raise DataError(f"{path} has no row of data; expected one example a line")
    return SentenceExamples(sentences=tuple(sentences), labels=tuple(labels))


def sentence_features(
    examples: SentenceExamples, task: SentenceTask, tokenizer: Tokenizer, *, max_sequence_length: int
) -> Features:
    """[CLS] A [SEP], or [CLS] A [SEP] B [SEP]; what is too long loses tokens at the end of its longer sentence."""
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
    """How much of each text is kept: the longer loses its last tokens first, one at a time, the second of equals."""
    if len(lengths) == 1:
        return [min(lengths[0], room)]
    first, second = lengths
    half = room // 2
    if first <= half:
        return [first, min(second, room - first)]
    if second <= half:
        return [min(first, room - second), second]
    return [first, second] if first + second <= room else [room - half, half]


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines that are not empty, with their numbers from 1."""
    try:
        with path.open(encoding="utf-8-sig", newline="\n") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line.rstrip("\r\n")
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist; give the folder of the task's files as data.folder=FOLDER") from error
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is no readable UTF-8 text: {error}") from error


def _place(path: Path, header: Sequence[str], name: str) -> int:
    if name not in header:
        raise DataError(f"{path}, line 1: expected a header line with a column '{name}', found {', '.join(header)}")
    return header.index(name)


def _label(text: str, task: SentenceTask, origin: str) -> float:
    if task.labels:
        if text not in task.labels:
            raise DataError(f"{origin}: expected a label of {task.title} ({', '.join(task.labels)}), found {text!r}")
        return float(task.labels.index(text))
    try:
        score = float(text)
    except ValueError:
        score = math.nan
    if not math.isfinite(score):
        raise DataError(f"{origin}: expected a number in column '{task.label}', found {text!r}")
    return score
