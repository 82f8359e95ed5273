"""Seconds of a micro-batch as a function of what it holds, fitted to measured ones."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float64, Int64
from pydantic import Field
from scipy.optimize import nnls

from evenpack.config import Section, validate
from evenpack.errors import ConfigError, DataError
from evenpack.files import write_json

_HELD_OUT_SHARE = 0.25
_FEWEST_DISTINCT = 12
"""Micro-batches of different make-up below which nothing would be left to hold out."""
_FOLDS = 5
_EARNS_ITS_PLACE = 0.9
"""A further term must bring the cross-validated error to this share of what it is without, or lower."""
_INDEPENDENT = 1e-3
"""Smallest singular value, as a share of the largest, at which terms of unit norm still count as different."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatchTimes:
    """Measured micro-batches, one row each. Rows that agree in all but the seconds are one micro-batch done again."""

    slots: Int64[np.ndarray, " rows"]
    squared_lengths: Int64[np.ndarray, " rows"]
    """Sum of length² over the segments that attention computed, those of padding included."""
    sequences: Int64[np.ndarray, " rows"]
    seconds: Float64[np.ndarray, " rows"]
    """Forward and backward."""

    def __post_init__(self) -> None:
        sizes = {len(values) for values in (self.slots, self.squared_lengths, self.sequences, self.seconds)}
        if len(sizes) != 1:
            raise ValueError(f"the columns have different lengths: {sorted(sizes)}")
        if not (np.isfinite(self.seconds).all() and (self.seconds > 0).all()):
            raise DataError("the seconds of a micro-batch must be positive numbers; measure again")

    @classmethod
    def concatenate(cls, parts: Sequence["MicroBatchTimes"]) -> "MicroBatchTimes":
        """The rows of all parts, in order."""
        return cls(
            slots=np.concatenate([part.slots for part in parts]),
            squared_lengths=np.concatenate([part.squared_lengths for part in parts]),
            sequences=np.concatenate([part.sequences for part in parts]),
            seconds=np.concatenate([part.seconds for part in parts]),
        )


class MeasuredOn(Section):
    """Where a cost model comes from."""

    device: str
    model: str
    """Kind and preset or shape."""
    causal: bool
    """Whether the model's attention is."""
    layers: int = Field(ge=1)
    """That were measured; nothing in the figures is scaled to another number."""
    hidden_size: int = Field(ge=1)
    vocabulary_size: int = Field(ge=1)
    rows_per_micro_batch: int = Field(ge=1)
    """Packs or sequences of a whole one. The constant belongs to this number where a part of the model has a fixed size
    for each row, as BERT's masked-token head has."""
    layouts: tuple[str, ...]
    precision: str
    attention: str
    """The backend, or `auto`."""
    evenpack: str
    torch: str
    commit: str | None
    """Of the source, where it is a checkout."""
    date: str
    """ISO 8601, UTC."""


class CostModel(Section):
    """Seconds of forward and backward over a micro-batch:
    constant + per_token · slots + per_squared_length · Σ segment² + per_sequence · sequences.
    """

    constant: float = Field(ge=0.0)
    per_token: float = Field(ge=0.0)
    """Seconds a slot, real or padding: what a slot costs outside attention."""
    per_squared_length: float = Field(ge=0.0)
    per_sequence: float = Field(default=0.0, ge=0.0)
    """0 unless it made the fit clearly better."""
    per_step: float = Field(ge=0.0)
    """Seconds once a step: the optimizer."""
    noise: float = Field(ge=0.0)
    """Standard deviation of the held-out seconds / predicted seconds: what the model leaves unexplained."""
    repeat_noise: float | None = Field(ge=0.0)
    """The same for one micro-batch measured again, about its mean; null where none was."""
    held_out_median_error: float = Field(ge=0.0)
    """Of |seconds / predicted - 1| over micro-batches that the fit has not seen."""
    held_out_95_percent_error: float = Field(ge=0.0)
    """Its 95th percentile."""
    samples: int = Field(ge=1)
    """Measured micro-batches, repeats and held-out ones included."""
    measured_on: MeasuredOn

    def seconds(
        self,
        slots: Int64[np.ndarray, "*shape"],
        squared_lengths: Int64[np.ndarray, "*shape"],
        sequences: Int64[np.ndarray, "*shape"] | None = None,
    ) -> Float64[np.ndarray, "*shape"]:
        """Expected seconds of micro-batches, without noise.

        Raises: ValueError if sequences cost something and are not given.
        """
        expected = self.constant + self.per_token * slots + self.per_squared_length * squared_lengths
        if self.per_sequence == 0.0:
            return expected
        if sequences is None:
            raise ValueError("this cost model charges for each sequence: give their number")
        return expected + self.per_sequence * sequences

    @property
    def assignment_weights(self) -> tuple[float, float]:
        """a and b for `training.cost_weights` of a layout whose slots follow the sequences."""
        return self.per_token, self.per_squared_length

    @classmethod
    def read(cls, path: Path) -> "CostModel":
        """Raises: ConfigError if the file is missing, is no JSON object, or holds something else."""
        return validate(read_cost_values(path), cls, origin=f"cost model {path}")

    def write(self, path: Path) -> None:
        """As JSON. Raises: ConfigError if the file cannot be written."""
        try:
            write_json(path, self.model_dump(mode="json"))
        except OSError as error:
            raise ConfigError(f"cost model {path} cannot be written: {error.strerror}") from error


def read_cost_values(path: Path) -> dict[str, Any]:
    """What a cost model's file holds. Raises: ConfigError if it is missing or is no JSON object."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cost model {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"cost model {path} is no JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"cost model {path} must hold a JSON object, found {type(values).__name__}")
    return values


def fit_cost_model(times: MicroBatchTimes, *, per_step: float, measured_on: MeasuredOn, seed: int = 0) -> CostModel:
    """Non-negative least squares on relative errors. A quarter of the distinct micro-batches, drawn by `seed`, is held
    out: repeats of one are never on both sides.

    The term for sequences stays only if cross-validation within the other three quarters says that it earns its place.

    Raises: DataError if there are too few different micro-batches, or if they differ too little to tell the cost of a
    slot from that of a squared length.
    """
    terms = _terms(times)
    distinct, group = np.unique(terms, axis=0, return_inverse=True)
    if len(distinct) < _FEWEST_DISTINCT:
        raise DataError(
            f"a cost model needs {_FEWEST_DISTINCT} micro-batches of different make-up or more, got {len(distinct)}: "
            "measure more packs"
        )
    place = shuffled_places(group.ravel(), seed=seed)
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
        per_token=float(weights[1]),
        per_squared_length=float(weights[2]),
        per_sequence=float(weights[3]),
        per_step=per_step,
        noise=float(ratio.std()),
        repeat_noise=_repeat_noise(times.seconds, group.ravel()),
        held_out_median_error=float(np.median(errors)),
        held_out_95_percent_error=float(np.percentile(errors, 95)),
        samples=len(times.seconds),
        measured_on=measured_on,
    )


def shuffled_places(group: Int64[np.ndarray, " rows"], *, seed: int) -> Int64[np.ndarray, " rows"]:
    """The place of each row's micro-batch in a random order of them: the same for all repeats of one."""
    places: Int64[np.ndarray, " rows"] = np.random.default_rng(seed).permutation(int(group.max()) + 1)[group]
    return places


def _terms(times: MicroBatchTimes) -> Float64[np.ndarray, "rows 4"]:
    ones = np.ones(len(times.seconds))
    return np.stack([ones, times.slots, times.squared_lengths, times.sequences], axis=1).astype(np.float64)


def _solve(
    terms: Float64[np.ndarray, "rows columns"], seconds: Float64[np.ndarray, " rows"]
) -> Float64[np.ndarray, " columns"]:
    """Weights that are not negative and make the sum of squared relative errors least. Raises: DataError."""
    relative = terms / seconds[:, None]
    norms = np.linalg.norm(relative, axis=0)
    try:
        solution, _ = nnls(relative / norms, np.ones(len(seconds)))
    except RuntimeError as error:
        raise DataError(f"the cost model does not converge ({error}): measure more micro-batches") from error
    weights: Float64[np.ndarray, " columns"] = solution / norms
    return weights


def _chosen_columns(
    terms: Float64[np.ndarray, "rows 4"], seconds: Float64[np.ndarray, " rows"], *, folds: Int64[np.ndarray, " rows"]
) -> list[int]:
    """Constant, slots, squares, and the sequences if they earn it."""
    plain, wide = [0, 1, 2], [0, 1, 2, 3]
    if not terms[:, 3].any():
        return plain
    without, with_sequences = (
        np.sqrt(np.mean([_fold_error(terms[:, columns], seconds, folds == fold) for fold in range(_FOLDS)]))
        for columns in (plain, wide)
    )
    return wide if with_sequences <= _EARNS_ITS_PLACE * without else plain


def _fold_error(
    terms: Float64[np.ndarray, "rows columns"],
    seconds: Float64[np.ndarray, " rows"],
    left_out: Bool[np.ndarray, " rows"],
) -> float:
    """Mean squared relative error of the rows left out."""
    predicted = terms[left_out] @ _solve(terms[~left_out], seconds[~left_out])
    return float(np.mean((predicted / seconds[left_out] - 1.0) ** 2))


def _require_independent(terms: Float64[np.ndarray, "rows 3"], seconds: Float64[np.ndarray, " rows"]) -> None:
    relative = terms / seconds[:, None]
    singular = np.linalg.svd(relative / np.linalg.norm(relative, axis=0), compute_uv=False)
    if singular[-1] < _INDEPENDENT * singular[0]:
        raise DataError(
            "the micro-batches measured are too much alike to tell the cost of a slot from that of a squared length "
            f"(singular values {singular[-1] / singular[0]:.1e} apart): measure other numbers of packs, and packs of "
            "short sequences beside packs of long ones"
        )


def _repeat_noise(seconds: Float64[np.ndarray, " rows"], group: Int64[np.ndarray, " rows"]) -> float | None:
    """Pooled over the micro-batches that were measured more than once."""
    counts = np.bincount(group)
    degrees_of_freedom = int((counts[counts > 1] - 1).sum())
    if degrees_of_freedom == 0:
        return None
    means = np.bincount(group, weights=seconds) / counts
    deviations = seconds / means[group] - 1.0
    return float(np.sqrt((deviations**2).sum() / degrees_of_freedom))
