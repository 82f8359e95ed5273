"""Packing algorithms side by side."""
