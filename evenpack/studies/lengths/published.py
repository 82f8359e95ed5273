"""The length histograms of "Efficient Sequence Packing without Cross-contamination" (PackedBERT, appendix).

published_histograms.json  English Wikipedia cut for BERT at five lengths, and the question-context pairs of SQuAD 1.1
                           at 384. Misprinted bins are corrected so that the totals of the paper hold.
glue_histograms.json       The training sets of four tasks of GLUE, counted with BERT's uncased vocabulary (special
                           tokens included, nothing cut). The paper prints no bins of them: at 128 they give table 6.
"""

import json
from functools import cache
from pathlib import Path

import numpy as np

from evenpack.data.packing import LengthHistogram

_FILES = ("published_histograms.json", "glue_histograms.json")


def published_names() -> tuple[str, ...]:
    """Returns the names that `published_histogram` knows."""
    return tuple(_counts())


def published_histogram(name: str) -> LengthHistogram:
    """Returns the histogram of that name. Raises: KeyError for another name."""
    return LengthHistogram(counts=np.array(_counts()[name], dtype=np.int64))


@cache
def _counts() -> dict[str, list[int]]:
    counts: dict[str, list[int]] = {}
    for name in _FILES:
        counts |= json.loads(Path(__file__).with_name(name).read_text())
    return counts
