"""Defines paths within the checkout, and finds programs."""

import json
import os
import shutil
import sys
from pathlib import Path

import evenpack

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"

_HISTOGRAMS = Path(evenpack.__file__).parent / "studies" / "lengths" / "published_histograms.json"
PUBLISHED_HISTOGRAMS = json.loads(_HISTOGRAMS.read_text(encoding="utf-8"))
"""Sequences by length, from length 1 on, by the data set's name."""


def find_tool(name: str) -> str | None:
    """Returns the program of that name in the environment of these tests, or on the PATH; None if there is none."""
    own = Path(sys.executable).parent
    return shutil.which(name, path=os.pathsep.join([str(own), os.environ.get("PATH", os.defpath)]))
