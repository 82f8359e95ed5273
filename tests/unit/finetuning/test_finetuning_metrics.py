"""Metrics agree with examples computed by hand."""

import math
import sys

import numpy as np
import pytest

from evenpack.errors import ConfigError
from evenpack.finetuning.tasks import (
    METRICS,
    TASKS,
    SentenceTask,
    average_scores,
    most_frequent,
    require_metrics,
    score_sentences,
)

LABELS = np.array([1, 1, 1, 0, 0, 1, 0, 1])
PREDICTIONS = np.array([1, 1, 0, 0, 1, 1, 0, 1])
"""4 true positives, 2 true negatives, 1 false positive, 1 false negative."""


@pytest.mark.parametrize(
    ("metric", "value"),
    [
        ("accuracy", 6 / 8),
        ("f1", 2 * 4 / (2 * 4 + 1 + 1)),
        ("matthews_correlation", (4 * 2 - 1 * 1) / math.sqrt(5 * 5 * 3 * 3)),
    ],
)
def test_metrics_of_classes(metric: str, value: float) -> None:
    assert METRICS[metric](LABELS, PREDICTIONS) == pytest.approx(value)


def test_metrics_of_scores() -> None:
    labels, predictions = np.array([1.0, 2.0, 3.0]), np.array([1.0, 4.0, 4.5])
    assert METRICS["pearson"](labels, predictions) == pytest.approx(np.corrcoef(labels, predictions)[0, 1])
    assert METRICS["spearman"](labels, predictions) == pytest.approx(1.0)
    assert METRICS["spearman"](labels, -predictions) == pytest.approx(-1.0)
    assert METRICS["pearson"](labels, np.zeros(3)) == 0.0


def test_every_task_names_metrics_that_there_are() -> None:
    for task in TASKS.values():
        if isinstance(task, SentenceTask):
            assert set(task.metrics) <= METRICS.keys()


def test_an_interval_is_that_of_the_sample() -> None:
    """For 400 examples with an accuracy of 0.8, the normal approximation gives plus or minus 0.039."""
    labels = np.ones(400, dtype=np.int64)
    predictions = (np.arange(400) % 5 > 0).astype(np.int64)
    scores = score_sentences(labels, predictions, ("accuracy",))
    assert scores.values == {"accuracy": 0.8}
    low, high = scores.intervals()["accuracy"]
    half = 1.96 * math.sqrt(0.8 * 0.2 / 400)
    assert low == pytest.approx(0.8 - half, abs=0.006)
    assert high == pytest.approx(0.8 + half, abs=0.006)
    assert scores.intervals() == scores.intervals()


def test_shares_are_averaged() -> None:
    assert average_scores({"f1": np.array([0.0, 0.5, 1.0])}).values == {"f1": 0.5}


def test_guessing_takes_the_most_frequent_class_or_the_mean_score() -> None:
    assert most_frequent(np.array([2, 1, 2, 0])) == 2
    assert most_frequent(np.array([1.0, 2.0, 6.0], dtype=np.float32)) == 3.0


def test_missing_scikit_learn_is_said_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.metrics", None)
    with pytest.raises(ConfigError, match=r"pip install 'evenpack\[finetune\]'"):
        require_metrics()
