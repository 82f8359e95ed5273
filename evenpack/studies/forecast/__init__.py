"""Tests how well the times of one rank predict the waiting of several ranks."""
