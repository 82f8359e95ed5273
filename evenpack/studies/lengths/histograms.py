"""Histograms in JSON, one or several by name."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from evenpack.config import nearest
from evenpack.data.packing import LengthHistogram
from evenpack.errors import DataError
from evenpack.studies.lengths.counter import LONGEST


def from_json(path: Path, name: str | None) -> LengthHistogram:
    """The histogram in a file, or the one named so. Raises: DataError with what is wrong in the file."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is no JSON: {error}") from error
    if _is_counts(values):
        if name is not None:
            raise DataError(f"{path} is a single histogram and has none named '{name}'")
        return LengthHistogram(counts=_counts(values, str(path)))
    if not isinstance(values, dict) or not values or not all(_is_counts(inner) for inner in values.values()):
        raise DataError(
            f'{path}: expected counts by length ([n1, n2, ...] or {{"17": n, ...}}), or several of them by name'
        )
    if name is None:
        raise DataError(f"{path} holds several histograms: choose one with --name; known: {', '.join(values)}")
    if name not in values:
        raise DataError(f"{path} has no histogram named '{name}'; {nearest(name, list(values))}")
    return LengthHistogram(counts=_counts(values[name], f"{path}, {name}"))


def _is_counts(values: Any) -> bool:
    if isinstance(values, dict):
        return bool(values) and all(key.isdecimal() and isinstance(inner, int) for key, inner in values.items())
    return isinstance(values, list) and bool(values) and all(isinstance(inner, int) for inner in values)


def _counts(values: Any, origin: str) -> Int64[np.ndarray, " longest"]:
    if isinstance(values, list):
        return np.array(values, dtype=np.int64)
    lengths = np.array([int(key) for key in values], dtype=np.int64)
    if lengths.min() < 1 or lengths.max() > LONGEST:
        raise DataError(f"{origin}: a length must be from 1 to {LONGEST}, found {lengths.min()} and {lengths.max()}")
    counts = np.zeros(int(lengths.max()), dtype=np.int64)
    np.add.at(counts, lengths - 1, np.array(list(values.values()), dtype=np.int64))
    return counts
