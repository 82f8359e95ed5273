"""Provides the lengths that benchmarks pack: a published histogram from a file, or a synthetic one."""

import argparse
import json
from pathlib import Path

import numpy as np

from evenpack.data.packing import LengthHistogram


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--histogram", type=Path, help="JSON: key -> counts, item i for length i + 1; default: made up")
    parser.add_argument("--key", default="wikipedia_512", help="which histogram of the file (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def load(arguments: argparse.Namespace) -> tuple[str, LengthHistogram]:
    """Returns a name for the report, and the histogram."""
    if arguments.histogram is None:
        return "synthetic", synthetic()
    counts = json.loads(arguments.histogram.read_text())[arguments.key]
    return arguments.key, LengthHistogram(counts=np.array(counts, dtype=np.int64))


def synthetic(sequences: int = 16_300_000, longest: int = 512) -> LengthHistogram:
    """Returns log-normal lengths, a quarter of them cut at the longest, as when documents are cut into pieces."""
    lengths = np.arange(1, longest)
    shares = np.exp(-((np.log(lengths) - 5.3) ** 2) / 2) / lengths
    shares = np.append(0.75 * shares / shares.sum(), 0.25)
    return LengthHistogram(counts=np.rint(shares * sequences).astype(np.int64))


def print_report(report: dict[str, float | int | str], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(report, indent=2))
        return
    width = max(map(len, report))
    for name, value in report.items():
        print(
            f"{name.replace('_', ' '):<{width}}  {value:,}"
            if not isinstance(value, str)
            else f"{name:<{width}}  {value}"
        )
