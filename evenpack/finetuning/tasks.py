"""The tasks for which a pretrained encoder can be fine-tuned: their predictions and their metrics.

The files of sentences are described in `evenpack.data.tasks.glue`. Sources: Wang et al. 2019 (GLUE), table 1;
Rajpurkar et al. 2016 (SQuAD 1.1).
"""

from dataclasses import dataclass
from typing import Literal

from evenpack.data.tasks.glue import GLUE_TASKS, GlueTask

Prediction = Literal["class", "score", "span"]
"""Kinds of prediction: one of several labels; a number; the position of an answer in a text."""


@dataclass(frozen=True, kw_only=True)
class SentenceTask:
    """A task that predicts a label or a score for a sentence, or for a pair of sentences."""

    glue: GlueTask
    """The files, with their columns and labels."""
    metrics: tuple[str, ...]
    """Names in `metrics.py`; the first is the one by which seeds are ranked."""
    has_been_run: bool = False

    @property
    def title(self) -> str:
        return self.glue.folder

    @property
    def training_file(self) -> str:
        return self.glue.training_file

    @property
    def evaluation_files(self) -> tuple[str, ...]:
        return self.glue.validation_files

    @property
    def predicts(self) -> Prediction:
        return "class" if self.glue.labels else "score"

    @property
    def outputs(self) -> int:
        """Outputs of the head for each sequence."""
        return len(self.glue.labels) or 1


@dataclass(frozen=True, kw_only=True)
class SpanTask:
    """A task of questions whose answers are in a text; SQuAD 1.1's JSON."""

    title: str
    training_file: str
    evaluation_files: tuple[str, ...]
    metrics: tuple[str, ...] = ("f1", "exact_match")
    has_been_run: bool = False
    predicts: Prediction = "span"
    outputs: int = 2
    """Outputs of the head for each token: the answer begins here, it ends here."""


AnyTask = SentenceTask | SpanTask

TASKS: dict[str, AnyTask] = {
    "cola": SentenceTask(glue=GLUE_TASKS["cola"], metrics=("matthews_correlation", "accuracy"), has_been_run=True),
    "sst2": SentenceTask(glue=GLUE_TASKS["sst2"], metrics=("accuracy",), has_been_run=True),
    "mrpc": SentenceTask(glue=GLUE_TASKS["mrpc"], metrics=("f1", "accuracy")),
    "stsb": SentenceTask(glue=GLUE_TASKS["stsb"], metrics=("spearman", "pearson")),
    "qqp": SentenceTask(glue=GLUE_TASKS["qqp"], metrics=("f1", "accuracy")),
    "mnli": SentenceTask(glue=GLUE_TASKS["mnli"], metrics=("accuracy",)),
    "qnli": SentenceTask(glue=GLUE_TASKS["qnli"], metrics=("accuracy",)),
    "rte": SentenceTask(glue=GLUE_TASKS["rte"], metrics=("accuracy",), has_been_run=True),
    "wnli": SentenceTask(glue=GLUE_TASKS["wnli"], metrics=("accuracy",), has_been_run=True),
    "squad": SpanTask(title="SQuAD 1.1", training_file="train-v1.1.json", evaluation_files=("dev-v1.1.json",)),
}
