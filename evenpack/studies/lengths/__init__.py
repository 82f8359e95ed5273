"""Sequence lengths, as people have them, become a histogram."""
