"""Metrics of predictions, their intervals, and the scores of guessing without reading.

All are fractions: 1 is perfect (SQuAD's own script multiplies by 100).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int64, Shaped

from evenpack.errors import ConfigError

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


def _pearson(labels: Shaped[np.ndarray, " N"], predictions: Shaped[np.ndarray, " N"]) -> float:
    from scipy.stats import pearsonr

    return 0.0 if _is_constant(labels, predictions) else float(pearsonr(labels, predictions).statistic)


def _spearman(labels: Shaped[np.ndarray, " N"], predictions: Shaped[np.ndarray, " N"]) -> float:
    from scipy.stats import spearmanr

    return 0.0 if _is_constant(labels, predictions) else float(spearmanr(labels, predictions).statistic)


def _is_constant(*columns: Shaped[np.ndarray, " N"]) -> bool:
    """Returns whether values are constant: a correlation is then undefined, and counts as 0."""
    return any(np.ptp(column) == 0 for column in columns)


METRICS: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "accuracy": _accuracy,
    "matthews_correlation": _matthews_correlation,
    "f1": _f1,
    "pearson": _pearson,
    "spearman": _spearman,
}
"""Functions of (labels, predictions). F1 is that of class 1."""
