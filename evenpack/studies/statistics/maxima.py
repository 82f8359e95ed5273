"""Expected maxima of independent draws."""

from typing import Any

import numpy as np
from jaxtyping import Float64
from scipy import integrate, stats

_LAWS = {"normal": stats.norm, "Gumbel": stats.gumbel_r, "generalised extreme value": stats.genextreme}


def expected_maximum_of_draws(values: Float64[np.ndarray, " values"], draws: int) -> float:
    """Of draws with replacement from `values`: the i-th smallest is the largest with (i/m)^n - ((i-1)/m)^n."""
    ranks = np.arange(len(values) + 1) / len(values)
    return float(np.sort(values) @ np.diff(ranks**draws))


def expected_maximum(law: Any, draws: int) -> float:
    """Of independent draws from a frozen SciPy distribution: its quantiles over the n-th root of a uniform number."""
    value, _ = integrate.quad(lambda share: float(law.ppf(share ** (1.0 / draws))), 0.0, 1.0, limit=200)
    return float(value)


def best_law(values: Float64[np.ndarray, " values"]) -> tuple[str, Any]:
    """The law with the least AIC of those fitted by maximum likelihood."""
    fitted = {name: law(*law.fit(values)) for name, law in _LAWS.items()}

    def criterion(name: str) -> float:
        return float(2 * len(fitted[name].args) - 2 * fitted[name].logpdf(values).sum())

    name = min(fitted, key=criterion)
    return name, fitted[name]
