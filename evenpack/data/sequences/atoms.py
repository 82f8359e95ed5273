"""Atoms: the units that are shuffled before rows are made of them.

A split's slots are cut into atoms, the atoms are shuffled by a keyed permutation, and their concatenation is cut into
rows. The size of an atom divides that of a row, so that a row holds several, or is a multiple of it.

Source: "Optimizing Packing and Shuffling Strategies for Enhanced Performance in Generative Language Models", A.3.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64, Integer

from evenpack.data.order.permutation import derive_key, permute, unpermute
from evenpack.data.order.plan import sequence_id_type

_AT_ONCE = 1 << 20


@dataclass(frozen=True, kw_only=True, eq=False)
class RowParts:
    """The parts of atoms that K rows hold: Q parts, row by row."""

    atoms: Int64[np.ndarray, " Q"]
    begins: Int64[np.ndarray, " Q"]
    """First slot within the atom."""
    slots: Int64[np.ndarray, " Q"]
    per_row: Int64[np.ndarray, " K"]


def shuffled_atoms(count: int, *, moved: int, seed: int) -> Integer[np.ndarray, " atoms"]:
    """Returns the atom at each rank of the order, in the smallest type; those from `moved` on keep their ranks."""
    order = np.arange(count, dtype=sequence_id_type(count))
    for start in range(0, moved, _AT_ONCE):
        places = np.arange(start, min(start + _AT_ONCE, moved))
        keys = np.full(len(places), derive_key(seed))
        order[start : start + len(places)] = permute(places, np.full(len(places), moved), keys)
    return order


def places_of(atoms: Int64[np.ndarray, " Q"], *, moved: int, seed: int) -> Int64[np.ndarray, " Q"]:
    """Returns the ranks of these atoms in the order of `shuffled_atoms`; its inverse, by arithmetic."""
    places = atoms.copy()
    shuffled = atoms < moved
    keys = np.full(int(shuffled.sum()), derive_key(seed))
    places[shuffled] = unpermute(atoms[shuffled], np.full(len(keys), moved), keys)
    return places


def rows_of_atoms(
    places: Int64[np.ndarray, " Q"], *, row: int, atom: int, total_slots: int
) -> Int64[np.ndarray, " rows"]:
    """Returns the rows of the atoms at these ranks, where all atoms have one size, except perhaps for the last one."""
    per_atom = max(1, atom // row)
    rows = (places * atom // row)[:, None] + np.arange(per_atom)
    return rows.ravel()[rows.ravel() * row < total_slots]


def uniform_parts(
    rows: Int64[np.ndarray, " K"], order: Integer[np.ndarray, " atoms"], *, row: int, atom: int, total_slots: int
) -> RowParts:
    """Returns the parts of these rows, where all atoms have one size, except for a last one that may be shorter.

    Args:
        row: slots of a row.
        atom: slots of an atom.
    """
    part, per_row = min(row, atom), max(1, row // atom)
    begins = rows * row
    counts = np.minimum(per_row, -(-(total_slots - begins) // part))
    if per_row > 1:
        within_row = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        begins = np.repeat(begins, counts) + within_row * part
    places, within = np.divmod(begins, atom)
    slots = np.minimum(total_slots - begins, part)
    return RowParts(atoms=order[places].astype(np.int64), begins=within, slots=slots, per_row=counts)
