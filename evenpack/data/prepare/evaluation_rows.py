"""A fixed evaluation set, recognised among training rows by the tokens before masking, whatever the masks."""

import numpy as np
from jaxtyping import Bool, UInt64

from evenpack.data.prepare.progress import Progress
from evenpack.data.sequences import MaskedPairsView
from evenpack.data.shards.layout import ShardSet
from evenpack.data.shards.masked_sequences import MaskedSequences
from evenpack.data.shards.reading import ShardSlice, read_slices
from evenpack.data.sources.config import Hdf5Source
from evenpack.errors import DataError

_ROWS_AT_ONCE = 2048


class EvaluationRows:
    """Refuses training rows that are in the evaluation set, or counts them if the source allows it."""

    def __init__(
        self, identities: UInt64[np.ndarray, " rows"], shards: ShardSet, name: str, source: Hdf5Source
    ) -> None:
        """Takes `identities` of `MaskedSequences.identities`, in any order."""
        self._identities = np.sort(identities)
        self._shards = shards
        self._name = name
        self._is_allowed = source.allow_validation_overlap
        self._overlapping = 0
        self._first_place = ""

    @classmethod
    def of(cls, view: MaskedPairsView, shards: ShardSet, name: str, source: Hdf5Source) -> "EvaluationRows":
        """Reads those of a prepared evaluation set, which was made from `shards`."""
        identities = [
            MaskedSequences.of_view(view, first, min(first + _ROWS_AT_ONCE, view.count)).identities()
            for first in range(0, view.count, _ROWS_AT_ONCE)
        ]
        return cls(np.concatenate(identities), shards, name, source)

    def choose(self, part: ShardSlice) -> Bool[np.ndarray, " K"]:
        """Returns all sequences of the slice.

        Raises: DataError naming the first row of the evaluation set, unless allowed.
        """
        identities = part.sequences.identities()
        found = self._identities[np.searchsorted(self._identities[:-1], identities)] == identities
        (overlapping,) = np.nonzero(found)
        if len(overlapping):
            place = part.place(int(overlapping[0]))
            if not self._is_allowed:
                raise DataError(
                    f"{place}: the evaluation set has the same tokens at {self._place_of(identities[overlapping[0]])}; "
                    "evaluation rows must not be trained on: remove it from one of them, or allow it with "
                    f"data.sources.{self._name}.allow_validation_overlap=true"
                )
            self._first_place = self._first_place or place
            self._overlapping += len(overlapping)
        return np.ones(len(identities), dtype=np.bool_)

    def tell(self, progress: Progress) -> None:
        """Reports once how many rows are in both sets, among those that this call read."""
        if self._overlapping:
            progress.note(
                f"source '{self._name}': {self._overlapping:,} training rows are in the evaluation set too, "
                f"{self._first_place} first, and are trained on (allow_validation_overlap)"
            )

    def _place_of(self, identity: np.uint64) -> str:
        """Returns the position in the evaluation set, found by reading its shards, because it is not stored."""
        for part in read_slices(self._shards):
            (matches,) = np.nonzero(part.sequences.identities() == identity)
            if len(matches):
                return part.place(int(matches[0]))
        raise AssertionError("the set was made from these shards")
