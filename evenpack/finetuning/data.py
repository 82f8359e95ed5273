"""A task's files, read and checked, as sequences; and the evaluation of predictions for them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from evenpack.data.sequences.labelled import LabelledSequences
from evenpack.data.tokenizers.tokenizer import Tokenizer
from evenpack.errors import DataError
from evenpack.files import file_checksum
from evenpack.finetuning.config import FinetuneDataSection
from evenpack.finetuning.sentences import read_sentences, sentence_sequences
from evenpack.finetuning.squad import Question, Windows, best_answers, read_questions, score_answers, windows_of
from evenpack.finetuning.tasks import SentenceTask, SpanTask, TaskScores, most_frequent, score_sentences


@runtime_checkable
class EvaluationSet(Protocol):
    """A file on which the task is evaluated."""

    @property
    def sequences(self) -> LabelledSequences: ...

    def score(self, outputs: Sequence[np.ndarray]) -> TaskScores:
        """Evaluates the head's outputs for each sequence, in the file's order."""

    def score_guesses(self, training: LabelledSequences) -> TaskScores | None:
        """Returns the scores of a baseline that predicts a constant from the training labels; None without one."""


@dataclass(frozen=True, kw_only=True)
class TaskData:
    """All data of a fine-tuning."""

    training: LabelledSequences
    evaluation: dict[str, EvaluationSet]
    """Evaluation sets by the file's name without its ending."""
    checksums: dict[str, str]
    """Checksums of the files, by name."""


@dataclass(frozen=True, kw_only=True)
class SentenceSet:
    """An evaluation set of sentences with labels or scores."""

    task: SentenceTask
    sequences: LabelledSequences

    def score(self, outputs: Sequence[np.ndarray]) -> TaskScores:
        values = np.stack(outputs)
        predictions = values.argmax(axis=1) if self.task.predicts == "class" else values[:, 0]
        return score_sentences(self.sequences.labels, predictions, self.task.metrics)

    def score_guesses(self, training: LabelledSequences) -> TaskScores | None:
        guesses = np.full_like(self.sequences.labels, most_frequent(training.labels))
        return score_sentences(self.sequences.labels, guesses, self.task.metrics)


@dataclass(frozen=True, kw_only=True)
class QuestionSet:
    """An evaluation set of questions about texts."""

    questions: tuple[Question, ...]
    windows: Windows
    max_answer_length: int

    @property
    def sequences(self) -> LabelledSequences:
        return self.windows.sequences

    def score(self, outputs: Sequence[np.ndarray]) -> TaskScores:
        given = best_answers(outputs, self.windows, self.questions, max_answer_length=self.max_answer_length)
        return score_answers(given, self.questions)

    def score_guesses(self, training: LabelledSequences) -> TaskScores | None:
        return None


def read_task(section: FinetuneDataSection, tokenizer: Tokenizer) -> TaskData:
    """Reads the task's files.

    Raises: DataError that names the file and its row for invalid content; nothing is written.
    """
    task = section.definition
    files = {name: section.task_folder / name for name in (task.training_file, *task.evaluation_files)}
    return TaskData(
        training=_read(files[task.training_file], section, tokenizer).sequences,
        evaluation={Path(name).stem: _read(files[name], section, tokenizer) for name in task.evaluation_files},
        checksums={name: file_checksum(path) for name, path in files.items()},
    )


def _read(path: Path, section: FinetuneDataSection, tokenizer: Tokenizer) -> EvaluationSet:
    task = section.definition
    found: EvaluationSet
    if isinstance(task, SpanTask):
        questions = read_questions(path)
        windows = windows_of(questions, tokenizer, section)
        found = QuestionSet(questions=tuple(questions), windows=windows, max_answer_length=section.max_answer_length)
    else:
        rows, length = read_sentences(path, task.glue), section.max_sequence_length
        sequences = sentence_sequences(rows, task.glue, tokenizer, max_sequence_length=length)
        found = SentenceSet(task=task, sequences=sequences)
    unknown = tokenizer.unknown_share(found.sequences.token_file.read(0, found.sequences.token_file.tokens))
    if unknown > _MOST_UNKNOWN:
        raise DataError(
            f"{path}: {100 * unknown:.0f} % of the tokens are unknown to the vocabulary, which is of other texts; "
            "give the tokenizer of the weights as data.tokenizer"
        )
    return found


_MOST_UNKNOWN = 0.5
"""Largest fraction of unknown tokens: half of a text; no vocabulary of its language comes near it."""
