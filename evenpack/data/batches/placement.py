"""The positions of a batch's sequences, in one of three layouts.

    packed      one row of `pack_length` slots for each pack; always rows x pack_length slots
    unpadded    whole sequences concatenated; as many slots as real tokens, so ranks differ
    padded      one row for each sequence, as a rectangle of `max_sequence_length` columns, or as many as the longest
                sequence needs where similar lengths were assigned together

In a rectangle a sequence's padding follows it. A causal model cannot see it from the sequence, so there it belongs to
the sequence's last segment, and has the cost of padded training. A bidirectional model would see it: there it is a
segment of its own.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from evenpack.data.order.assignment import padded_width
from evenpack.data.order.selection import PackSelection
from evenpack.data.order.step_shape import UNPADDED_SLOT_MULTIPLE, StepShape
from evenpack.data.ranges import ranges


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The positions of M sequences among T slots: K real segments, and all segments including padding."""

    slots: int
    row_slots: int
    """Slots of a row; `slots` where there are no rows."""
    slot_of_token: Int64[np.ndarray, " tokens"]
    """Destination of each real token, sequence after sequence."""
    segment_last_slots: Int64[np.ndarray, " K"]
    """The last real slot of each real segment."""
    segment_starts: Int64[np.ndarray, " segments"]
    """First slot of each segment, ascending; each ends where the next begins."""
    position_ids: Int64[np.ndarray, " T"]


@dataclass(frozen=True, kw_only=True)
class Placer:
    """Places packs of whole sequences into rows of slots."""

    shape: StepShape
    pack_length: int
    max_sequence_length: int
    """Tokens of the longest sequence of any source."""
    is_bidirectional: bool
    """Whether the model sees the tokens after a token."""

    @property
    def rows(self) -> int:
        """Maximum number of packs of a batch."""
        return self.shape.items_per_micro_batch

    @property
    def max_segment_length(self) -> int:
        """Upper bound of a segment's length."""
        return self.max_sequence_length if self.shape.isolate else self.pack_length

    @property
    def position_rows(self) -> int:
        """Upper bound of all positions, exclusive."""
        return self.max_sequence_length if self.shape.reset_positions else self.pack_length

    def place(
        self,
        packs: PackSelection,
        segment_lengths: Int64[np.ndarray, " K"],
        segments_per_sequence: Int64[np.ndarray, " M"],
        *,
        rows: int,
    ) -> Placement:
        """Places the packs, or their sequences, into rows, in order.

        Args:
            rows: number of rows of packs, in the packed layout; missing packs become padding.
        """
        ends = np.cumsum(packs.lengths)
        tight_starts = ends - packs.lengths
        starts, slots, padding = self._sequence_starts(packs, tight_starts, rows)
        row_slots = {"packed": self.pack_length, "padded": slots // len(starts), "unpadded": slots}
        shift = starts - tight_starts
        segment_shift = np.repeat(shift, segments_per_sequence)
        segment_ends = np.cumsum(segment_lengths)
        segment_starts = segment_ends - segment_lengths + segment_shift
        apart = np.sort(np.concatenate([segment_starts, padding]))
        visible = apart
        if not self.shape.isolate:
            visible = np.sort(
                np.concatenate([np.unique(segment_starts // self.pack_length) * self.pack_length, padding])
            )
        return Placement(
            slots=slots,
            row_slots=row_slots[self.shape.layout],
            slot_of_token=np.arange(packs.lengths.sum()) + np.repeat(shift, packs.lengths),
            segment_last_slots=segment_ends - 1 + segment_shift,
            segment_starts=visible,
            position_ids=self._positions(apart, slots),
        )

    def _positions(self, starts: Int64[np.ndarray, " segments"], slots: int) -> Int64[np.ndarray, " T"]:
        if not self.shape.reset_positions:
            return np.arange(slots) % self.pack_length
        return np.arange(slots) - np.repeat(starts, np.diff(np.append(starts, slots)))

    def _sequence_starts(
        self, packs: PackSelection, tight_starts: Int64[np.ndarray, " M"], rows: int
    ) -> tuple[Int64[np.ndarray, " M"], int, Int64[np.ndarray, " P"]]:
        """Returns the first slot of each sequence, the number of slots, and the start of each padding segment."""
        if self.shape.layout == "padded":
            width = int(padded_width(self.shape.policy, packs.lengths.max(keepdims=True), self.max_sequence_length)[0])
            starts = np.arange(len(packs.sequence_ids)) * width
            short = packs.lengths < (width if self.is_bidirectional else 0)
            return starts, len(starts) * width, (starts + packs.lengths)[short]
        tokens = int(packs.lengths.sum())
        if self.shape.layout == "unpadded":
            slots = -(-tokens // UNPADDED_SLOT_MULTIPLE) * UNPADDED_SLOT_MULTIPLE
            return tight_starts, slots, self._padding_starts(np.array([tokens]), np.array([slots]))
        row_starts = np.arange(rows) * self.pack_length
        before = np.append(tight_starts, tokens)[packs.offsets]  # tokens before each pack, and all
        starts = tight_starts + np.repeat(row_starts[: packs.packs] - before[:-1], packs.sizes)
        filled = row_starts.copy()
        filled[: packs.packs] += before[1:] - before[:-1]
        return starts, rows * self.pack_length, self._padding_starts(filled, row_starts + self.pack_length)

    def _padding_starts(
        self, starts: Int64[np.ndarray, " R"], ends: Int64[np.ndarray, " R"]
    ) -> Int64[np.ndarray, " P"]:
        """Returns starts of padding segments no longer than a sequence, so that static kernel bounds hold."""
        pieces = -(-(ends - starts) // self.max_sequence_length)
        piece = ranges(np.zeros_like(pieces), pieces)
        return np.repeat(starts, pieces) + piece * self.max_sequence_length
