"""Defines paths within the checkout."""

import json
from pathlib import Path

import evenpack

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"

_HISTOGRAMS = Path(evenpack.__file__).parent / "studies" / "lengths" / "published_histograms.json"
PUBLISHED_HISTOGRAMS = json.loads(_HISTOGRAMS.read_text(encoding="utf-8"))
"""Sequences by length, from length 1 on, by the data set's name."""
