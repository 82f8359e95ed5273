"""Limits that settings and packing share; imports nothing, so that a run file is read at once."""

MOST_SLOTS = 1 << 24
"""Of a pack, and so of a sequence; guards the memory of a histogram against a stray number."""

MOST_PACKS_A_STEP = 1 << 22
"""And most sequences: each rank plans the whole step, at some 50 bytes a pack. The largest batches in use have a
hundredth of that."""

MOST_STEPS = 1 << 40
"""So that the number of the last pack, steps x packs a step, still fits into 64 bits."""

MOST_VOCABULARY = 1 << 24
"""Entries; ten times the largest vocabulary in use."""
