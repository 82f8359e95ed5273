"""The tasks for which a pretrained encoder can be fine-tuned: their predictions, and the metrics of these.

The files of sentences are described in `evenpack.data.tasks.glue`. Sources: Wang et al. 2019 (GLUE), table 1;
Rajpurkar et al. 2016 (SQuAD 1.1).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
from jaxtyping import Float, Int64, Shaped

from evenpack.data.tasks.glue import GLUE_TASKS, GlueTask
from evenpack.errors import ConfigError

Prediction = Literal["class", "score", "span"]
"""Kinds of prediction: one of several labels; a number; the position of an answer in a text."""


@dataclass(frozen=True, kw_only=True)
class SentenceTask:
    """A task that predicts a label or a score for a sentence, or for a pair of sentences."""

    glue: GlueTask
    """The files, with their columns and labels."""
    metrics: tuple[str, ...]
    """Names in `METRICS`; the first is the one by which seeds are ranked."""

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
    predicts: Prediction = "span"
    outputs: int = 2
    """Outputs of the head for each token: the answer begins here, it ends here."""


AnyTask = SentenceTask | SpanTask

TASKS: dict[str, AnyTask] = {
    "cola": SentenceTask(glue=GLUE_TASKS["cola"], metrics=("matthews_correlation", "accuracy")),
    "sst2": SentenceTask(glue=GLUE_TASKS["sst2"], metrics=("accuracy",)),
    "mrpc": SentenceTask(glue=GLUE_TASKS["mrpc"], metrics=("f1", "accuracy")),
    "stsb": SentenceTask(glue=GLUE_TASKS["stsb"], metrics=("spearman", "pearson")),
    "qqp": SentenceTask(glue=GLUE_TASKS["qqp"], metrics=("f1", "accuracy")),
    "mnli": SentenceTask(glue=GLUE_TASKS["mnli"], metrics=("accuracy",)),
    "qnli": SentenceTask(glue=GLUE_TASKS["qnli"], metrics=("accuracy",)),
    "rte": SentenceTask(glue=GLUE_TASKS["rte"], metrics=("accuracy",)),
    "wnli": SentenceTask(glue=GLUE_TASKS["wnli"], metrics=("accuracy",)),
    "squad": SpanTask(title="SQuAD 1.1", training_file="train-v1.1.json", evaluation_files=("dev-v1.1.json",)),
}


_RESAMPLES = 1000
_CONFIDENCE = 0.95
_BOOTSTRAP_SEED = 0

Measure = Callable[[Int64[np.ndarray, " chosen"]], float]
"""A metric over some of the examples, given by index."""


@dataclass(frozen=True, kw_only=True)
class TaskScores:
    """The metrics of the predictions for a file."""

    examples: int
    measures: Mapping[str, Measure]
    """Measures by metric."""

    @property
    def values(self) -> dict[str, float]:
        """Returns each metric over all examples."""
        return {name: measure(np.arange(self.examples)) for name, measure in self.measures.items()}

    def intervals(self) -> dict[str, tuple[float, float]]:
        """Returns 95 % intervals of each metric by bootstrap percentiles over examples (1,000 resamples).

        They measure the variation between samples of as many examples, for the same trained model.

        Source: Efron and Tibshirani 1993, An Introduction to the Bootstrap, section 13.3.
        """
        chance = np.random.default_rng(_BOOTSTRAP_SEED)
        chosen = chance.integers(self.examples, size=(_RESAMPLES, self.examples))
        tails = [(1 - _CONFIDENCE) / 2, (1 + _CONFIDENCE) / 2]
        found = {}
        for name, measure in self.measures.items():
            low, high = np.quantile([measure(one) for one in chosen], tails)
            found[name] = (float(low), float(high))
        return found


def score_sentences(
    labels: Shaped[np.ndarray, " N"], predictions: Shaped[np.ndarray, " N"], metrics: tuple[str, ...]
) -> TaskScores:
    """Returns the named metrics of `METRICS`."""

    def measure_of(name: str) -> Measure:
        metric = METRICS[name]
        return lambda chosen: metric(labels[chosen], predictions[chosen])

    return TaskScores(examples=len(labels), measures={name: measure_of(name) for name in metrics})


def average_scores(shares: Mapping[str, Float[np.ndarray, " N"]]) -> TaskScores:
    """Returns metrics that are means over examples."""

    def measure_of(values: Float[np.ndarray, " N"]) -> Measure:
        return lambda chosen: float(values[chosen].mean())

    count = len(next(iter(shares.values())))
    return TaskScores(examples=count, measures={name: measure_of(values) for name, values in shares.items()})


def most_frequent(labels: Shaped[np.ndarray, " N"]) -> Shaped[np.ndarray, ""]:
    """Returns the constant prediction of the baseline: the most frequent class, or the mean score."""
    if labels.dtype.kind == "f":
        return np.asarray(labels.mean())
    return np.asarray(np.bincount(labels).argmax())


def require_metrics() -> None:
    """Checks that scikit-learn is installed. Raises: ConfigError if it is not."""
    try:
        import sklearn.metrics  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "fine-tuning computes its metrics by scikit-learn, which is not installed: pip install 'evenpack[finetune]'"
        ) from error


def _accuracy(labels: Shaped[np.ndarray, " N"], predictions: Shaped[np.ndarray, " N"]) -> float:
    return float(np.mean(labels == predictions))  # scikit-learn's checks would take 100 times as long for each resample


def _matthews_correlation(labels: Shaped[np.ndarray, " N"], predictions: Shaped[np.ndarray, " N"]) -> float:
    from sklearn.metrics import matthews_corrcoef

    return float(matthews_corrcoef(labels, predictions))


def _f1(labels: Shaped[np.ndarray, " N"], predictions: Shaped[np.ndarray, " N"]) -> float:
    from sklearn.metrics import f1_score

    return float(f1_score(labels, predictions, zero_division=0.0))


def _correlation(name: str, labels: Shaped[np.ndarray, " N"], predictions: Shaped[np.ndarray, " N"]) -> float:
    """Returns SciPy's correlation of this name; it is undefined where values are constant, and counts as 0 then."""
    from scipy import stats

    is_constant = np.ptp(labels) == 0 or np.ptp(predictions) == 0
    return 0.0 if is_constant else float(getattr(stats, name)(labels, predictions).statistic)


METRICS: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "accuracy": _accuracy,
    "matthews_correlation": _matthews_correlation,
    "f1": _f1,
    "pearson": partial(_correlation, "pearsonr"),
    "spearman": partial(_correlation, "spearmanr"),
}
"""Functions of (labels, predictions). All are at most 1, which is perfect; F1 is computed for class 1."""
