"""The randomness of an order, compared with a uniform permutation."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from evenpack.studies.shuffle.config import ShuffleSection
from evenpack.studies.shuffle.orders import Order


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Measures of one order."""

    displacement: float
    """Mean distance between a sequence's positions in the corpus and in training, as a fraction of the corpus; 1/3
    under a uniform permutation."""
    pack_mates: float | None
    """Fraction of the pairs of sequences in a pack from one stretch of the corpus; None: no pack has two."""
    step_mates: float | None
    """The same for pairs in a step and not in a pack."""
    window_distance: float
    """The greatest total variation distance between the sources of a window of the epoch and those of the whole."""


def quality(order: Order, labels: Int64[np.ndarray, " N"], section: ShuffleSection, *, packs_per_step: int) -> Quality:
    """Measures an order; `labels` are the part of the corpus, such as the file, of each sequence by rank."""
    count = len(order.ranks)
    stretches = order.ranks * section.stretches // count
    pack_equal, pack_pairs = _equal_pairs(order.packs, stretches)
    step_equal, step_pairs = _equal_pairs(order.packs // packs_per_step, stretches)
    step_equal, step_pairs = step_equal - pack_equal, step_pairs - pack_pairs
    return Quality(
        displacement=float(np.abs(order.ranks - np.arange(count)).mean() / count),
        pack_mates=pack_equal / pack_pairs if pack_pairs else None,
        step_mates=step_equal / step_pairs if step_pairs else None,
        window_distance=window_distance(labels[order.ranks], windows=section.windows),
    )


def window_distance(labels: Int64[np.ndarray, " N"], *, windows: int) -> float:
    """Returns the greatest total variation distance between the labels of a window and all, in training order."""
    kinds = int(labels.max()) + 1
    overall = np.bincount(labels, minlength=kinds) / len(labels)
    return max(
        float(np.abs(np.bincount(window, minlength=kinds) / len(window) - overall).sum() / 2)
        for window in np.array_split(labels, windows)
        if len(window)
    )


def _equal_pairs(groups: Int64[np.ndarray, " N"], values: Int64[np.ndarray, " N"]) -> tuple[int, int]:
    """Returns the pairs within a group that have the same value, and all pairs within a group."""
    together = groups * (int(values.max()) + 1) + values
    _, equal = np.unique(together, return_counts=True)
    _, sizes = np.unique(groups, return_counts=True)
    return _pairs(equal), _pairs(sizes)


def _pairs(sizes: Int64[np.ndarray, " groups"]) -> int:
    return int((sizes * (sizes - 1) // 2).sum())
