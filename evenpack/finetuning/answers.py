"""Turns the outputs of a span head into answers, and computes SQuAD's metrics of them.

The definitions are those of SQuAD 1.1's official evaluation script: answers are compared in lower case, without
punctuation, without the words a, an and the, with single spaces; exact match and F1 over words, each against the most
similar correct answer, are averaged over questions.
"""

import math
import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from evenpack.finetuning.metrics import TaskScores, average_scores
from evenpack.finetuning.questions import Question, Windows

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
