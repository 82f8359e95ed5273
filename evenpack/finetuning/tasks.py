"""The tasks that a pretrained encoder can be fine-tuned for: their files, columns, labels and metrics.

One more task of sentences is one more line here. Sources: Wang et al. 2019 (GLUE), table 1, and the columns of the
files that GLUE publishes; Rajpurkar et al. 2016 (SQuAD 1.1).
"""

from dataclasses import dataclass
from typing import Literal

Prediction = Literal["class", "score", "span"]
"""One of several labels; a number; where in a text the answer stands."""


@dataclass(frozen=True, kw_only=True)
class SentenceTask:
    """A label or a score for a sentence, or for a pair of them; tab-separated files without quoting."""

    title: str
    training_file: str = "train.tsv"
    evaluation_files: tuple[str, ...] = ("dev.tsv",)
    columns: tuple[str, ...] | None = None
    """Names of the columns where the files have no header line."""
    sentences: tuple[str, ...]
    """Columns of the one sentence, or of both."""
    label: str
    """Column."""
    labels: tuple[str, ...]
    """Those there are; a score has none."""
    metrics: tuple[str, ...]
    """Of `metrics.py`; the first is the one that seeds are ranked by."""
    has_been_run: bool = False

    @property
    def predicts(self) -> Prediction:
        return "class" if self.labels else "score"

    @property
    def outputs(self) -> int:
        """Of the head, for each sequence."""
        return len(self.labels) or 1


@dataclass(frozen=True, kw_only=True)
class SpanTask:
    """A question whose answer stands in a text; SQuAD 1.1's JSON."""

    title: str
    training_file: str
    evaluation_files: tuple[str, ...]
    metrics: tuple[str, ...] = ("f1", "exact_match")
    has_been_run: bool = False
    predicts: Prediction = "span"
    outputs: int = 2
    """Of the head, for each token: the answer begins here, it ends here."""


AnyTask = SentenceTask | SpanTask

_ENTAILMENT = ("entailment", "not_entailment")

TASKS: dict[str, AnyTask] = {
    "cola": SentenceTask(
        title="CoLA",
        columns=("source", "label", "mark", "sentence"),
        sentences=("sentence",),
        label="label",
        labels=("0", "1"),
        metrics=("matthews_correlation", "accuracy"),
        has_been_run=True,
    ),
    "sst2": SentenceTask(
        title="SST-2",
        sentences=("sentence",),
        label="label",
        labels=("0", "1"),
        metrics=("accuracy",),
        has_been_run=True,
    ),
    "mrpc": SentenceTask(
        title="MRPC",
        sentences=("#1 String", "#2 String"),
        label="Quality",
        labels=("0", "1"),
        metrics=("f1", "accuracy"),
    ),
    "stsb": SentenceTask(
        title="STS-B",
        sentences=("sentence1", "sentence2"),
        label="score",
        labels=(),
        metrics=("spearman", "pearson"),
    ),
    "qqp": SentenceTask(
        title="QQP",
        sentences=("question1", "question2"),
        label="is_duplicate",
        labels=("0", "1"),
        metrics=("f1", "accuracy"),
    ),
    "mnli": SentenceTask(
        title="MNLI",
        evaluation_files=("dev_matched.tsv", "dev_mismatched.tsv"),
        sentences=("sentence1", "sentence2"),
        label="gold_label",
        labels=("entailment", "neutral", "contradiction"),
        metrics=("accuracy",),
    ),
    "qnli": SentenceTask(
        title="QNLI",
        sentences=("question", "sentence"),
        label="label",
        labels=_ENTAILMENT,
        metrics=("accuracy",),
    ),
    "rte": SentenceTask(
        title="RTE",
        sentences=("sentence1", "sentence2"),
        label="label",
        labels=_ENTAILMENT,
        metrics=("accuracy",),
        has_been_run=True,
    ),
    "wnli": SentenceTask(
        title="WNLI",
        sentences=("sentence1", "sentence2"),
        label="label",
        labels=("0", "1"),
        metrics=("accuracy",),
    ),
    "squad": SpanTask(title="SQuAD 1.1", training_file="train-v1.1.json", evaluation_files=("dev-v1.1.json",)),
}
