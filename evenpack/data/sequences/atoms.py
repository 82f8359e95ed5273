"""Atoms: what is shuffled before rows are made of it.

A split's slots are cut into atoms, these are shuffled by a keyed permutation, and what lies one behind another then is
cut into rows. An atom divides a row, so that a row holds several, or is a multiple of it and makes several rows. All is
arithmetic: from a row to the atoms that it holds, no order is stored.

Source: "Optimizing Packing and Shuffling Strategies for Enhanced Performance in Generative Language Models", A.3.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from evenpack.data.order.permutation import derive_key, permute


@dataclass(frozen=True, kw_only=True, eq=False)
class RowParts:
    """What the K rows asked for hold of which atoms: Q parts, row by row."""

    atoms: Int64[np.ndarray, " Q"]
    begins: Int64[np.ndarray, " Q"]
    """First slot within the atom."""
    slots: Int64[np.ndarray, " Q"]
    per_row: Int64[np.ndarray, " K"]


@dataclass(frozen=True, kw_only=True)
class AtomOrder:
    """The atoms of a split, all of one size but for a last one that may be shorter and stays last."""

    row: int
    """Slots of a row."""
    atom: int
    total_slots: int
    seed: int

    def parts(self, rows: Int64[np.ndarray, " K"]) -> RowParts:
        """Of which atoms these rows consist."""
        per_row = max(1, self.row // self.atom)
        begins = (rows[:, None] * self.row + np.arange(per_row) * min(self.row, self.atom)).ravel()
        is_there = begins < self.total_slots
        counts = is_there.reshape(len(rows), per_row).sum(axis=1)
        begins = begins[is_there]
        places, within = np.divmod(begins, self.atom)
        slots = np.minimum(self.total_slots - begins, min(self.row, self.atom))
        atoms = shuffled(places, self.total_slots // self.atom, self.seed)
        return RowParts(atoms=atoms, begins=within, slots=slots, per_row=counts)


def shuffled(places: Int64[np.ndarray, " Q"], count: int, seed: int) -> Int64[np.ndarray, " Q"]:
    """The atom at each place of the order; places from `count` on keep theirs."""
    moved = places < count
    atoms = places.copy()
    chosen = places[moved]
    atoms[moved] = permute(chosen, np.full(len(chosen), count), np.full(len(chosen), derive_key(seed)))
    return atoms
