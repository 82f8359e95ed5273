"""Maximum likelihood for each law, one sample at a time: some hundred microseconds each, for the bootstrap's sake."""

import math

import numpy as np
from jaxtyping import Float64
from scipy import optimize

from evenpack.errors import FitError
from evenpack.studies.statistics.laws import GeneralisedExtremeValue, Gumbel, Normal

_ITERATIONS = 100
_LARGEST_SHAPE = 0.99
"""Below -1 the likelihood has no maximum, above 1 the law has no mean."""
_OUTSIDE = 1e6
"""Loss of a law that says a measured value cannot be."""


def fit_gumbel(values: Float64[np.ndarray, " values"]) -> Gumbel:
    """Maximum likelihood, whose scale solves scale = mean - weighted mean with weights exp(-value / scale)."""
    centre, unit = float(values.mean()), float(values.std())
    standard = (values - centre) / unit
    low = float(standard.min())

    def surplus(scale: float) -> float:
        weights = np.exp(-(standard - low) / scale)
        return scale + float((standard * weights).sum() / weights.sum())

    # As the scale goes to 0 the surplus goes to the lowest value, below 0; at the largest value it is above 0.
    solved = optimize.root_scalar(surplus, bracket=(1e-3, 1.0 - low), maxiter=_ITERATIONS)
    if not solved.converged:
        raise FitError(f"the scale did not converge in {_ITERATIONS} iterations")
    location = low - solved.root * math.log(float(np.exp(-(standard - low) / solved.root).mean()))
    return Gumbel(location=centre + unit * location, scale=unit * solved.root)


def fit_normal(values: Float64[np.ndarray, " values"]) -> Normal:
    """Maximum likelihood."""
    return Normal(location=float(values.mean()), scale=float(values.std()))


def fit_generalised_extreme_value(values: Float64[np.ndarray, " values"]) -> GeneralisedExtremeValue:
    """Maximum likelihood by L-BFGS-B from the fitted Gumbel, which has every value in its support."""
    start = fit_gumbel(values)
    standard = (values - start.location) / start.scale
    bounds = [(-5.0, 5.0), (-5.0, 5.0), (-_LARGEST_SHAPE, _LARGEST_SHAPE)]
    found = optimize.minimize(
        _extreme_value_loss, np.zeros(3), args=(standard,), jac=True, method="L-BFGS-B", bounds=bounds
    )
    location, log_scale, shape = found.x.tolist()
    if not found.success or abs(shape) >= _LARGEST_SHAPE:
        raise FitError(f"the likelihood has no maximum that could be found, at shape {shape:.3g}: {found.message}")
    return GeneralisedExtremeValue(
        location=start.location + start.scale * location, scale=start.scale * math.exp(log_scale), shape=shape
    )


def _extreme_value_loss(
    parameters: Float64[np.ndarray, " 3"], values: Float64[np.ndarray, " values"]
) -> tuple[float, Float64[np.ndarray, " 3"]]:
    """Mean negative log-likelihood of location, ln scale and shape, with its gradient.

    With z = (value - location) / scale and y = ln(1 + shape z) / shape it is ln scale + (1 + shape) y + exp(-y).
    """
    location, log_scale, shape = parameters.tolist()
    standard = (values - location) * math.exp(-log_scale)
    inside = 1.0 + shape * standard
    if inside.min() <= 0.0:
        return _OUTSIDE, np.zeros(3)
    if abs(shape) < 1e-5:
        variate = standard - 0.5 * shape * standard**2
        by_shape = -0.5 * standard**2
    else:
        variate = np.log1p(shape * standard) / shape
        by_shape = (standard / inside - variate) / shape
    tail = np.exp(-variate)
    by_variate = 1.0 + shape - tail
    loss = log_scale + float(((1.0 + shape) * variate + tail).mean())
    gradient = [
        -math.exp(-log_scale) * float((by_variate / inside).mean()),
        1.0 - float((by_variate * standard / inside).mean()),
        float((variate + by_variate * by_shape).mean()),
    ]
    return loss, np.array(gradient)
