"""SQuAD 1.1: questions, windows over their texts as sequences, and the answers that predictions of spans give.

The metrics are computed as by SQuAD 1.1's official evaluation script: answers are compared in lower case, without
punctuation, without the words a, an and the, with single spaces; exact match and F1 over words, each against the most
similar correct answer, are averaged over questions. Here they are fractions; that script multiplies them by 100.
"""

import json
import math
import re
import string
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int64

from evenpack.data.sequences.labelled import LabelledSequences, TokenPair
from evenpack.data.tokenizers.tokenizer import EncodedText, Tokenizer
from evenpack.errors import DataError
from evenpack.finetuning.config import FinetuneDataSection
from evenpack.finetuning.tasks import TaskScores, average_scores


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question with all of its correct answers."""

    text: str
    context: str
    answers: tuple[str, ...]
    answer_start: int
    """First character of the first answer in the context."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Windows:
    """The windows of all questions, in order."""

    sequences: LabelledSequences
    questions: Int64[np.ndarray, " N"]
    """Index of each window's question."""
    context_starts: Int64[np.ndarray, " N"]
    """Start of a window's text in its sequence."""
    offsets: tuple[Int64[np.ndarray, " _ 2"], ...]
    """First character and end, in the context, of each token of text of each window."""


def read_questions(path: Path) -> list[Question]:
    """Reads a file of SQuAD 1.1.

    Raises: DataError that names the file and the question's path for anything but SQuAD 1.1's form, a question without
    answers, or an answer that is not at its stated position in the context.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist; give the folder of the task's files as data.folder=FOLDER") from error
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} is not readable JSON: {error}") from error
    questions = list(_questions(content, path))
    if not questions:
        raise DataError(f"{path} holds no question; expected SQuAD's data[..].paragraphs[..].qas[..]")
    return questions


def windows_of(questions: Sequence[Question], tokenizer: Tokenizer, section: FinetuneDataSection) -> Windows:
    """Makes [CLS] question [SEP] window [SEP], with as many windows as cover the context.

    The label of a window that does not hold the whole first answer is its [CLS], as in BERT's own fine-tuning.
    """
    asked = tokenizer.encode_texts([question.text for question in questions])
    distinct = list(dict.fromkeys(question.context for question in questions))
    encoded = dict(zip(distinct, tokenizer.encode_texts(distinct), strict=True))
    special = tokenizer.pair_tokens
    pairs, labels, owners, context_starts, offsets = [], [], [], [], []
    for index, (question, words) in enumerate(zip(questions, asked, strict=True)):
        context = encoded[question.context]
        kept = words.tokens[: section.max_question_length]
        first = np.concatenate([[special.classification_id], kept, [special.separator_id]])
        answer = _answer_tokens(question, context)
        room = section.max_sequence_length - len(first) - 1
        for start, end in _windows(len(context.tokens), room, section.window_stride):
            pairs.append(TokenPair(first=first, second=np.append(context.tokens[start:end], special.separator_id)))
            holds_answer = start <= answer[0] <= answer[1] < end
            labels.append([place - start + len(first) for place in answer] if holds_answer else [0, 0])
            owners.append(index)
            context_starts.append(len(first))
            offsets.append(context.offsets[start:end])
    return Windows(
        sequences=LabelledSequences.of(
            pairs,
            np.array(labels, dtype=np.int64),
            max_sequence_length=section.max_sequence_length,
        ),
        questions=np.array(owners, dtype=np.int64),
        context_starts=np.array(context_starts, dtype=np.int64),
        offsets=tuple(offsets),
    )


def _windows(tokens: int, room: int, stride: int) -> Iterator[tuple[int, int]]:
    """Returns first token and end of each window; the last one ends with the context."""
    start = 0
    while start + room < tokens:
        yield start, start + room
        start += stride
    yield start, tokens


def _answer_tokens(question: Question, context: EncodedText) -> tuple[int, int]:
    """Returns the first and last token of the first answer; (-1, -1) if it has no token."""
    begin, end = question.answer_start, question.answer_start + len(question.answers[0])
    inside = np.flatnonzero((context.offsets[:, 1] > begin) & (context.offsets[:, 0] < end))
    return (int(inside[0]), int(inside[-1])) if len(inside) else (-1, -1)


def _questions(content: Any, path: Path) -> Iterator[Question]:
    for article, entry in enumerate(_list(content, "data", f"{path}")):
        for number, paragraph in enumerate(_list(entry, "paragraphs", f"{path}, data[{article}]")):
            origin = f"{path}, data[{article}].paragraphs[{number}]"
            context = _text(paragraph, "context", origin)
            for row, item in enumerate(_list(paragraph, "qas", origin)):
                yield _question(item, context, f"{origin}.qas[{row}]")


def _question(item: Any, context: str, origin: str) -> Question:
    origin = f"{origin} (id {_text(item, 'id', origin)})"
    answers = _list(item, "answers", origin)
    if not answers:
        raise DataError(f"{origin}: expected one answer or more, found none; SQuAD 2.0 is another task")
    starts = [_answer_start(answer, context, f"{origin}.answers[{number}]") for number, answer in enumerate(answers)]
    return Question(
        text=_text(item, "question", origin),
        context=context,
        answers=tuple(answer["text"] for answer in answers),
        answer_start=starts[0],
    )


def _answer_start(answer: Any, context: str, origin: str) -> int:
    text = _text(answer, "text", origin)
    start = answer.get("answer_start")
    if isinstance(start, bool) or not isinstance(start, int) or start < 0:
        raise DataError(f"{origin}: answer_start must be a whole number of 0 or more, found {start!r}")
    found = context[start : start + len(text)]
    if found != text:
        raise DataError(
            f"{origin}: the answer {text[:60]!r} is not in its context at character {start}, where {found[:60]!r} is"
        )
    return start


def _list(holder: Any, key: str, origin: str) -> list[Any]:
    value = holder.get(key) if isinstance(holder, dict) else None
    if not isinstance(value, list):
        raise DataError(f"{origin}: expected an object with a list '{key}', as SQuAD 1.1 has it")
    return value


def _text(holder: Any, key: str, origin: str) -> str:
    value = holder.get(key) if isinstance(holder, dict) else None
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{origin}: expected a text '{key}', found {value!r:.60}")
    return value


_BEST_PLACES = 20
"""Number of most likely first and last tokens of a window that are combined, as in BERT's own script."""

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def score_answers(given: Sequence[str], questions: Sequence[Question]) -> TaskScores:
    """Returns exact match and F1 of one answer to each question."""
    pairs = list(zip(given, questions, strict=True))
    return average_scores(
        {
            "f1": np.array([max(word_f1(text, right) for right in question.answers) for text, question in pairs]),
            "exact_match": np.array(
                [
                    max(float(normalised(text) == normalised(right)) for right in question.answers)
                    for text, question in pairs
                ]
            ),
        }
    )


def best_answers(
    outputs: Sequence[Float[np.ndarray, " _ 2"]],
    windows: Windows,
    questions: Sequence[Question],
    *,
    max_answer_length: int,
) -> list[str]:
    """Returns the text of greatest summed output in any window of each question; empty if no span is possible.

    Args:
        outputs: of each window's tokens, question and special tokens included.
        max_answer_length: in tokens.
    """
    best = [_Span(score=-math.inf, begin=0, end=0) for _ in questions]
    for index, question in enumerate(windows.questions):
        offsets, start = windows.offsets[index], windows.context_starts[index]
        own = outputs[index][start : start + len(offsets)].astype(np.float64)
        for first in own[:, 0].argsort()[::-1][:_BEST_PLACES]:
            for last in own[:, 1].argsort()[::-1][:_BEST_PLACES]:
                score = float(own[first, 0] + own[last, 1])
                if first <= last < first + max_answer_length and score > best[question].score:
                    best[question] = _Span(score=score, begin=int(offsets[first, 0]), end=int(offsets[last, 1]))
    return [question.context[span.begin : span.end] for question, span in zip(questions, best, strict=True)]


def normalised(text: str) -> str:
    """Returns a text in the form in which answers are compared."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def word_f1(given: str, right: str) -> float:
    """Returns the harmonic mean of precision and recall over the words of both; 0 if they share none."""
    words, right_words = normalised(given).split(), normalised(right).split()
    shared = (Counter(words) & Counter(right_words)).total()
    return 2 * shared / (len(words) + len(right_words)) if shared else 0.0


@dataclass(frozen=True, kw_only=True)
class _Span:
    score: float
    begin: int
    """The range of characters in the context."""
    end: int
