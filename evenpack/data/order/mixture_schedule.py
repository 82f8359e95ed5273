"""A mixture whose weights change at given steps; each source's stream continues, so nothing is lost or repeated.

After a change, the order of draws is that of a new `Mixture` of the new weights: every prefix of the draws between two
changes is within a pack of their ratio. A source always gives the next pack of its own stream.
"""

from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from jaxtyping import Int64

from evenpack.data.order.mixture import Mixture
from evenpack.data.order.weight_change import WeightChange


class MixtureSchedule:
    """The endless order in which sources are drawn, and its inverse, for weights that may change at given steps."""

    def __init__(self, weights: Sequence[int], changes: Sequence[WeightChange] = (), *, items_per_step: int) -> None:
        """Takes the `weights` of the first step and the `changes` in the order of their steps.

        Raises: ConfigError for weights that no mixture can have.
        """
        made: dict[tuple[int, ...], Mixture] = {}
        given = (tuple(weights), *(change.weights for change in changes))
        self._mixtures = [made.get(one) or made.setdefault(one, Mixture(one)) for one in given]
        self._starts = [0, *((change.step - 1) * items_per_step for change in changes)]
        self._offsets = np.zeros((len(given), len(weights)), dtype=np.int64)
        """How often each source was drawn before each change."""
        for part in range(1, len(given)):
            draws = self._starts[part] - self._starts[part - 1]
            drawn = [self._mixtures[part - 1].drawn_before(source, draws) for source in range(len(weights))]
            self._offsets[part] = self._offsets[part - 1] + drawn

    def draws(self, start: int, stop: int) -> tuple[Int64[np.ndarray, " N"], Int64[np.ndarray, " N"]]:
        """Returns (source, position in that source's own stream) of the draws from `start` up to `stop`.

        The time does not depend on the start.
        """
        parts: list[tuple[Int64[np.ndarray, " _"], Int64[np.ndarray, " _"]]] = []
        while not parts or start < stop:
            part = bisect_right(self._starts, start) - 1
            end = min([stop, *self._starts[part + 1 : part + 2]])
            sources, positions = self._mixtures[part].draws(start - self._starts[part], end - self._starts[part])
            parts.append((sources, positions + self._offsets[part, sources]))
            start = end
        if len(parts) == 1:
            return parts[0]
        return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])

    def draws_of(self, source: int, positions: Int64[np.ndarray, " N"]) -> Int64[np.ndarray, " N"]:
        """Returns the numbers of the draws at these positions of the source's own stream; the inverse of `draws`."""
        offsets = self._offsets[:, source]
        parts = np.searchsorted(offsets, positions, side="right") - 1
        numbers = np.empty(len(positions), dtype=np.int64)
        for part in np.unique(parts).tolist():
            chosen = parts == part
            within = self._mixtures[part].draws_of(source, positions[chosen] - offsets[part])
            numbers[chosen] = within + self._starts[part]
        return numbers

    def drawn_before(self, source: int, stop: int) -> int:
        """Returns how many of the draws from 0 up to `stop` are of the source, which is its next stream position."""
        part = bisect_right(self._starts, stop) - 1
        return int(self._offsets[part, source]) + self._mixtures[part].drawn_before(source, stop - self._starts[part])

    def shares(self, stop: int) -> tuple[Fraction, ...]:
        """Returns each source's fraction of the draws from 0 up to `stop`; by the weights, where they never change."""
        if len(self._mixtures) == 1:
            mixture = self._mixtures[0]
            return tuple(Fraction(weight, mixture.period) for weight in mixture.weights)
        return tuple(Fraction(self.drawn_before(source, stop), stop) for source in range(self._offsets.shape[1]))
