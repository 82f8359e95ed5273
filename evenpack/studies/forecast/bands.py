"""The uncertainty of a forecast.

Order statistics and the fitted law: of the steps that one rank was timed on, by a bootstrap in blocks; the kind of law
stays the one that was chosen. Cost model: of the simulated steps alone, not of the model's coefficients.
"""

import numpy as np
from jaxtyping import Float64

from evenpack.errors import FitError
from evenpack.studies.statistics.fits import FITTERS, ROUNDS, AnyLaw, LawName, interval, resampled
from evenpack.studies.statistics.laws import expected_maximum, expected_maximum_of_draws
from evenpack.studies.statistics.paired import Interval

NORMAL_95 = 1.959964
"""Standard errors on either side that contain 95 % of a normal law."""

_SEED = 0


class Resampling:
    """Samples of one rank's steps, and the law fitted to each of them."""

    def __init__(self, seconds: Float64[np.ndarray, " steps"], law: LawName) -> None:
        self._samples = resampled(seconds, rounds=ROUNDS, seed=_SEED)
        self._laws = [fitted for sample in self._samples if (fitted := _fit(law, sample)) is not None]

    def intervals(self, ranks: int) -> dict[str, Interval]:
        """Returns the 95 % intervals of the expected slowest of `ranks`, by method."""
        drawn = [expected_maximum_of_draws(sample, ranks) for sample in self._samples]
        by_law = [expected_maximum(law, ranks) for law in self._laws]
        found = {"order statistics": interval(np.array(drawn))}
        return found | ({"fitted law": interval(np.array(by_law))} if by_law else {})


def interval_of_mean(values: Float64[np.ndarray, " n"]) -> Interval:
    """Returns the 95 % interval of the mean of independent values."""
    reach = NORMAL_95 * float(values.std(ddof=1)) / len(values) ** 0.5
    return Interval(low=float(values.mean()) - reach, high=float(values.mean()) + reach)


def _fit(law: LawName, sample: Float64[np.ndarray, " steps"]) -> AnyLaw | None:
    """Returns the law of a sample; None where the fit does not converge."""
    try:
        return FITTERS[law](sample)
    except FitError:
        return None
