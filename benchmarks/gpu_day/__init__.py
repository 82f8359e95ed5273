"""A quarter of an hour on a GPU, and an hour on a node of GPUs: what only these can show."""

from pathlib import Path

ROOT = Path(__file__).absolute().parents[2]

BERT, SMALL, XL = "bert_large_phase2_sprint", "gpt2_small", "gpt2_xl"
"""Shipped run files."""
