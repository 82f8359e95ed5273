"""Limits that settings and packing share; imports nothing, so that a run file is read at once."""

MOST_SLOTS = 1 << 24
"""Of a pack, and so of a sequence; guards the memory of a histogram against a stray number."""
