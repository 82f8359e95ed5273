"""Compares packing algorithms."""
