"""A source's stream whose packs change their form: what an epoch has left goes on, joined, then epochs in the new form.

Positions go on through all forms, so steps draw as if nothing had changed, and the stream of the last form answers for
the whole run. The sequences of each form are numbered behind those of the forms before.
"""

from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
from jaxtyping import Int64

from evenpack.data.order.pack_stream import DrawnPacks, PackStream, merged
from evenpack.data.ranges import ranges


@dataclass(frozen=True, kw_only=True)
class Form:
    """The place of a source's packs of one form in its stream."""

    packs: int
    """Packs of one epoch."""
    start: int = 0
    """Position of the first pack in this form."""
    rest: int = 0
    """Packs of the form before that its epoch has left there, and that are joined; 0: none, or they are left out."""
    joined: int = 1
    """Packs of the form before in a pack of the rest; the last may have fewer."""
    epoch: int = 0
    """The first epoch in this form: as many have begun before."""
    before: "Form | None" = None

    @property
    def then(self) -> int:
        """Position behind the rest: the first pack of the first epoch in this form."""
        return self.start - -self.rest // self.joined

    def followed(self, *, packs: int, position: int, joined: int | None) -> "Form":
        """Returns the form that follows from a position on.

        Args:
            packs: of one of its epochs.
            joined: packs of this form in one of its packs; None: the rest of the epoch is left out.
        """
        end = self.end_of_epoch(position)
        return Form(
            packs=packs,
            start=position,
            rest=0 if joined is None else end - position,
            joined=joined or 1,
            epoch=self.epoch + (end - self.then) // self.packs,
            before=self,
        )

    def end_of_epoch(self, position: int) -> int:
        """Returns the first position after the epoch that is not finished before `position`, or that ends there."""
        return self.then + max(0, -((self.then - position) // self.packs)) * self.packs

    def in_before(self, position: int) -> int:
        """Returns the position in the stream of the form before of what is at a position before `then`."""
        return min(position, self.start) + max(0, position - self.start) * self.joined

    def epochs(self, position: int) -> Fraction:
        """Returns the passes over the source before a position."""
        if self.before is not None and position < self.then:
            return self.before.epochs(self.in_before(position))
        return self.epoch + Fraction(position - self.then, self.packs)


class FormedStream:
    """The packs of a source whose form changes; those of forms before it are as they were at their positions."""

    def __init__(self, before: PackStream, after: PackStream, form: Form, *, first_sequence: int) -> None:
        """Takes the stream of the form before, the plan of this one, and the number of its first sequence."""
        self.before = before
        self.after = after
        self.form = form
        self.packs = after.packs
        """Packs of one epoch in the last form."""
        self.sequences = after.sequences
        self.max_sequences_per_pack = max(after.max_sequences_per_pack, form.joined * before.max_sequences_per_pack)
        self.pack_length = after.pack_length
        self._first_sequence = first_sequence
        self._shift = form.epoch * form.packs - form.then
        """Position in the plan of this form less that in the stream."""

    def epochs(self, stream_positions: Int64[np.ndarray, " N"]) -> Int64[np.ndarray, " N"]:
        """Returns the epoch of each position, that of the form before in its rest."""
        form = self.form
        earlier = np.where(stream_positions < form.start, self.before.epochs(stream_positions), form.epoch - 1)
        own = (stream_positions + self._shift) // self.packs
        return np.where(stream_positions < form.then, earlier, own)

    def place(self, position: int) -> tuple[bool, int]:
        """Returns whether the last form's own plan has a pack, and its position there, or in the stream before."""
        is_own = position >= self.form.then
        return is_own, position + self._shift if is_own else self.form.in_before(position)

    def draw(self, stream_positions: Int64[np.ndarray, " N"]) -> DrawnPacks:
        """Returns the packs at these positions of the stream, in any order and of any epochs.

        Raises: ValueError for a negative position.
        """
        groups = np.searchsorted([self.form.start, self.form.then], stream_positions, side="right")
        kinds = (self.before.draw, self._draw_joined, self._draw_own)
        drawn = {group: kinds[group](stream_positions[groups == group]) for group in np.unique(groups).tolist() or [2]}
        return merged(groups, drawn)

    def _draw_joined(self, stream_positions: Int64[np.ndarray, " N"]) -> DrawnPacks:
        form = self.form
        firsts = form.start + (stream_positions - form.start) * form.joined
        counts = np.minimum(form.joined, form.start + form.rest - firsts)
        packs = self.before.draw(ranges(firsts, counts))
        ends = np.concatenate([[0], np.cumsum(counts)])
        return replace(packs, offsets=packs.offsets[ends])

    def _draw_own(self, stream_positions: Int64[np.ndarray, " N"]) -> DrawnPacks:
        packs = self.after.draw(stream_positions + self._shift)
        return replace(packs, sequence_ids=packs.sequence_ids + self._first_sequence)
