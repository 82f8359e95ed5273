"""Limits that settings and packing share; imports nothing, so that a run file is read quickly."""

MOST_SLOTS = 1 << 24
"""Slots of a pack, and so of a sequence; guards the memory of a histogram against a wrong number."""

MOST_PACKS_A_STEP = 1 << 22
"""Packs of a step, and sequences: each rank plans the whole step, at some 50 bytes per pack. The largest batches in
use have a hundredth of that."""

MOST_STEPS = 1 << 40
"""Steps of a run, so that the number of the last pack, steps x packs per step, still fits into 64 bits."""

HIGHEST_WEIGHT = 1_000_000
"""Weight of a source in the mixture, whose order is kept for a whole period."""

MOST_VOCABULARY = 1 << 24
"""Entries of a vocabulary; ten times the largest one in use."""

TOKENISING_BYTES = 120
"""Bytes of memory that `tokenizers` takes for each byte of a document: 118 with GPT-2's on words of 5 letters."""

LONGEST_TRAINED_WORD = 1 << 12
"""Characters of a word from which on the trainer of a vocabulary sees pieces of it.

A merge moves all later letters of its word, so the time of a word grows with the square of its length: 7 s for 100,000
letters, and hours for a few million. Words that are encoded are whole: there the time grows with the length.
"""
