"""Tests whether a run of packs trains the same model as one without packing."""
