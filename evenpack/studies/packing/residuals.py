"""Least squares packing at several residual weights: packs, and sequences minus slots of each length.

Source: "Efficient Sequence Packing without Cross-contamination" (PackedBERT), sections F.4 and F.5.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from evenpack.data.packing import LengthHistogram
from evenpack.data.packing.least_squares import (
    StrategyMixture,
    all_strategies,
    exact_packs,
    mix_strategies,
    packing_matrix,
)
from evenpack.studies.shared_options import parse_list, whole_number


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A residual weight, and the lengths to which it applies."""

    weight: float
    weight_up_to: int
    """The longest length of this weight; others weigh 1."""

    @property
    def label(self) -> str:
        return "weight 1" if self.weight == 1 else f"weight {self.weight:g} up to {self.weight_up_to:,}"


PUBLISHED_SETTING = Setting(weight=0.09, weight_up_to=8)
"""PackedBERT's choice, whose residual is its figure 8."""


@dataclass(frozen=True, kw_only=True)
class MatrixSize:
    """The size of the packing matrix: the slots of each length in a pack of each strategy."""

    lengths: int
    """Rows: the lengths."""
    strategies: int
    """Columns: the ways to fill a pack exactly."""
    non_zeros: int


@dataclass(frozen=True, kw_only=True)
class ResidualRow:
    """The result of one setting."""

    setting: Setting
    packs: int
    efficiency: float
    """Fraction of slots that hold a token."""
    padding: int
    """Slots of all packs that hold no token."""
    mixed: int
    """Strategies in the solver's mixture, before rounding."""
    used: int
    """Strategies that fill a pack exactly and are used, after rounding; a sequence without a slot counts with the
    length that would complete its pack, as in PackedBERT."""
    left_over: int
    """Sequences without a slot in the rounded mixture."""
    missing: int
    """Slots without a sequence in the rounded mixture."""
    missing_tokens: int
    """Sum of their lengths."""
    cpu_seconds: float
    residual: tuple[float, ...]
    """Sequences minus slots of each length from 1 on, before rounding."""
    whole_residual: tuple[int, ...]
    """Sequences minus slots of each length from 1 on, after rounding."""


def settings_of(weights: Sequence[float], lengths: Sequence[int]) -> tuple[Setting, ...]:
    """Returns every weight with every length; a weight of 1 once, as it does not distinguish lengths."""
    pairs = {
        (weight, lengths[0] if weight == 1 else weight_up_to): None for weight in weights for weight_up_to in lengths
    }
    return tuple(Setting(weight=weight, weight_up_to=weight_up_to) for weight, weight_up_to in pairs)


def parse_settings(weights: str, up_to: str) -> tuple[Setting, ...]:
    """Parses `1,0.09,0` and `8,16` as settings. Raises: ConfigError for other words."""
    length = partial(whole_number, problem="is not a length of 1 or more", example="8,16")
    return settings_of(
        list(dict.fromkeys(parse_list(weights, "--residuals", _weight))),
        list(dict.fromkeys(parse_list(up_to, "--residuals-up-to", length))),
    )


def _weight(word: str) -> float:
    if not (word.replace(".", "", 1).isdecimal() and word.isascii()):
        raise ValueError(f"'{word}' is not a number of 0 or more; give 1,0.09,0")
    return float(word)


def matrix_size(pack_length: int, depth: int) -> MatrixSize:
    """Returns the size for packs of up to `depth` sequences. Raises: PackingError if there are too many strategies."""
    strategies = all_strategies(pack_length, depth)
    non_zeros = int(np.count_nonzero(packing_matrix(strategies, pack_length)))
    return MatrixSize(lengths=pack_length, strategies=len(strategies), non_zeros=non_zeros)


def search_residuals(
    histogram: LengthHistogram,
    settings: Sequence[Setting],
    *,
    pack_length: int,
    depth: int,
    begin: Callable[[Setting], None] = lambda setting: None,
) -> tuple[ResidualRow, ...]:
    """Returns a row for each setting; `begin` is called before each. Raises: PackingError, as `least_squares`."""
    rows = []
    for setting in settings:
        begin(setting)
        start = time.process_time()
        mixture = mix_strategies(
            histogram, pack_length, depth, weight=setting.weight, weight_up_to=setting.weight_up_to
        )
        packs = sum(exact_packs(mixture, depth, "paper").values())
        cpu_seconds = time.process_time() - start
        residual, lengths = mixture.whole_residual, np.arange(1, pack_length + 1)
        rows.append(
            ResidualRow(
                setting=setting,
                packs=packs,
                efficiency=histogram.tokens / (packs * pack_length),
                padding=packs * pack_length - histogram.tokens,
                mixed=int(np.count_nonzero(mixture.repeats)),
                used=_used(mixture, pack_length),
                left_over=int(residual[residual > 0].sum()),
                missing=int(-residual[residual < 0].sum()),
                missing_tokens=int(-(residual * lengths)[residual < 0].sum()),
                cpu_seconds=cpu_seconds,
                residual=tuple(mixture.residual.tolist()),
                whole_residual=tuple(residual.tolist()),
            )
        )
    return tuple(rows)


def _used(mixture: StrategyMixture, pack_length: int) -> int:
    """Counts the strategies of whole packs, and those that complete the packs of sequences without a slot."""
    left_over = (np.flatnonzero(mixture.whole_residual > 0) + 1).tolist()
    completed = {tuple(sorted({length, pack_length - length} - {0}, reverse=True)) for length in left_over}
    return len(mixture.packs.keys() | completed)
