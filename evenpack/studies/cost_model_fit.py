"""Cost models fitted to measured micro-batches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int64
from scipy.optimize import nnls

from evenpack.engine.resolving.cost_model import CostModel, MeasuredOn
from evenpack.errors import DataError

_HELD_OUT_SHARE = 0.25
_FEWEST_DISTINCT = 12
"""Least number of distinct micro-batches; with fewer, none could be held out."""
_FOLDS = 5
_MAXIMUM_ERROR_RATIO = 0.9
"""A further term is kept if it reduces the cross-validated error at least to this ratio."""
_INDEPENDENT = 1e-3
"""Smallest singular value, relative to the largest, at which terms of unit norm still count as different."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatchTimes:
    """Measured micro-batches, one row each. Rows that agree in all but the seconds are repeats of one micro-batch."""

    slots: Int64[np.ndarray, " rows"]
    squared_lengths: Int64[np.ndarray, " rows"]
    """Sum of length² over the segments that attention computed, including those of padding."""
    pairs_within: Mapping[int, Int64[np.ndarray, " rows"]]
    """For each window of the model's layers, the pairs of such segments that are at most so far apart."""
    layer_shares: Mapping[int, float]
    """The shares of the layers that have these windows; the others see whole segments."""
    segments: Int64[np.ndarray, " rows"]
    """Segments that attention computed, including those of padding."""
    seconds: Float64[np.ndarray, " rows"]
    """Seconds of forward and backward."""

    def __post_init__(self) -> None:
        sizes = {len(values) for values in (self.slots, self.squared_lengths, self.segments, self.seconds)}
        if len(sizes) != 1:
            raise ValueError(f"the columns have different lengths: {sorted(sizes)}")
        if not (np.isfinite(self.seconds).all() and (self.seconds > 0).all()):
            raise DataError("the seconds of a micro-batch must be positive numbers; measure again")

    @property
    def attended(self) -> Float64[np.ndarray, " rows"]:
        """Returns the pairs that attention computed, as an average of the layers: squared lengths, without windows."""
        pairs = (1.0 - sum(self.layer_shares.values())) * self.squared_lengths
        for window, share in self.layer_shares.items():
            pairs = pairs + share * self.pairs_within[window]
        return pairs

    @classmethod
    def concatenate(cls, parts: Sequence["MicroBatchTimes"]) -> "MicroBatchTimes":
        """Returns the rows of all parts, in order."""
        return cls(
            slots=np.concatenate([part.slots for part in parts]),
            squared_lengths=np.concatenate([part.squared_lengths for part in parts]),
            pairs_within={
                window: np.concatenate([part.pairs_within[window] for part in parts])
                for window in parts[0].pairs_within
            },
            layer_shares=parts[0].layer_shares,
            segments=np.concatenate([part.segments for part in parts]),
            seconds=np.concatenate([part.seconds for part in parts]),
        )


def fit_cost_model(times: MicroBatchTimes, *, per_step: float, measured_on: MeasuredOn) -> CostModel:
    """Fits a cost model by non-negative least squares on relative errors.

    A quarter of the distinct micro-batches, drawn at random, is held out: repeats of one are never on both sides.

    A pair that attends costs the same in a layer with a window as in another one: pairs within short windows grow with
    the slots, so that a weight of their own would not be separated from that of a slot.

    The term for segments is kept only if cross-validation within the other three quarters shows that it helps.

    Raises: DataError if there are too few different micro-batches, or if they differ too little to separate the cost of
    a slot from that of a squared length.
    """
    terms = _terms(times)
    distinct, group = np.unique(terms, axis=0, return_inverse=True)
    if len(distinct) < _FEWEST_DISTINCT:
        raise DataError(
            f"a cost model needs {_FEWEST_DISTINCT} different micro-batches or more, got {len(distinct)}: "
            "measure more of them (study throughput --samples), over more data"
        )
    place = shuffled_places(group.ravel(), seed=0)
    is_held_out = place < round(_HELD_OUT_SHARE * len(distinct))
    fitted = ~is_held_out
    _require_independent(terms[fitted][:, :3], times.seconds[fitted])
    columns = _chosen_columns(terms[fitted], times.seconds[fitted], folds=place[fitted] % _FOLDS)
    weights = np.zeros(terms.shape[1])
    weights[columns] = _solve(terms[fitted][:, columns], times.seconds[fitted])
    ratio = times.seconds[is_held_out] / (terms[is_held_out] @ weights)
    errors = np.abs(ratio - 1.0)
    return CostModel(
        constant=float(weights[0]),
        per_slot=float(weights[1]),
        per_squared_length=float(weights[2]) * (1.0 - sum(times.layer_shares.values())),
        per_pair_within={window: float(weights[2]) * share for window, share in times.layer_shares.items()},
        per_segment=float(weights[3]),
        per_step=per_step,
        noise=float(ratio.std()),
        repeat_noise=_repeat_noise(times.seconds, group.ravel()),
        held_out_median_error=float(np.median(errors)),
        held_out_95_percent_error=float(np.percentile(errors, 95)),
        samples=len(times.seconds),
        measured_on=measured_on,
    )


def shuffled_places(group: Int64[np.ndarray, " rows"], *, seed: int) -> Int64[np.ndarray, " rows"]:
    """Returns the rank of each row's micro-batch in a random order: the same for all repeats of one."""
    return np.random.default_rng(seed).permutation(int(group.max()) + 1)[group]


def _terms(times: MicroBatchTimes) -> Float64[np.ndarray, "rows 4"]:
    ones = np.ones(len(times.seconds))
    return np.stack([ones, times.slots, times.attended, times.segments], axis=1).astype(np.float64)


def _solve(
    terms: Float64[np.ndarray, "rows columns"], seconds: Float64[np.ndarray, " rows"]
) -> Float64[np.ndarray, " columns"]:
    """Returns the non-negative weights with the least sum of squared relative errors. Raises: DataError."""
    relative = terms / seconds[:, None]
    norms = np.linalg.norm(relative, axis=0)
    try:
        solution, _ = nnls(relative / norms, np.ones(len(seconds)))
    except RuntimeError as error:
        raise DataError(f"the cost model does not converge ({error}): measure more micro-batches") from error
    return solution / norms


def _chosen_columns(
    terms: Float64[np.ndarray, "rows 4"], seconds: Float64[np.ndarray, " rows"], *, folds: Int64[np.ndarray, " rows"]
) -> list[int]:
    """Returns the columns constant, slots, squares, and the segments if they help."""
    plain, wide = [0, 1, 2], [0, 1, 2, 3]
    if not terms[:, 3].any():
        return plain
    without, with_segments = (
        np.sqrt(np.mean([_fold_error(terms[:, columns], seconds, folds == fold) for fold in range(_FOLDS)]))
        for columns in (plain, wide)
    )
    return wide if with_segments <= _MAXIMUM_ERROR_RATIO * without else plain


def _fold_error(
    terms: Float64[np.ndarray, "rows columns"],
    seconds: Float64[np.ndarray, " rows"],
    left_out: Bool[np.ndarray, " rows"],
) -> float:
    """Returns the mean squared relative error of the rows left out."""
    predicted = terms[left_out] @ _solve(terms[~left_out], seconds[~left_out])
    return float(np.mean((predicted / seconds[left_out] - 1.0) ** 2))


def _require_independent(terms: Float64[np.ndarray, "rows 3"], seconds: Float64[np.ndarray, " rows"]) -> None:
    relative = terms / seconds[:, None]
    singular = np.linalg.svd(relative / np.linalg.norm(relative, axis=0), compute_uv=False)
    if singular[-1] < _INDEPENDENT * singular[0]:
        raise DataError(
            "the measured micro-batches are too similar to separate the cost of a slot from that of a squared length "
            f"(the smallest singular value is {singular[-1] / singular[0]:.1e} of the largest): measure other numbers "
            "of packs, and packs of short sequences as well as packs of long ones"
        )


def _repeat_noise(seconds: Float64[np.ndarray, " rows"], group: Int64[np.ndarray, " rows"]) -> float | None:
    """Returns the noise of repeats, pooled over the micro-batches that were measured more than once."""
    counts = np.bincount(group)
    degrees_of_freedom = int((counts[counts > 1] - 1).sum())
    if degrees_of_freedom == 0:
        return None
    means = np.bincount(group, weights=seconds) / counts
    deviations = seconds / means[group] - 1.0
    return float(np.sqrt((deviations**2).sum() / degrees_of_freedom))
