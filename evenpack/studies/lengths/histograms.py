"""Histograms in JSON, one or several by name."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from evenpack.config import nearest
from evenpack.data.limits import MOST_SLOTS
from evenpack.data.packing import LengthHistogram
from evenpack.data.packing.histogram import MOST_SEQUENCES
from evenpack.errors import DataError, PackingError

_FORM = '[n1, n2, ...] or {"17": n, ...}'
_MOST_DIGITS = 20
"""Digits of a length, including leading zeros."""


def from_json(path: Path, name: str | None) -> LengthHistogram:
    """Reads the histogram in a file, or the one of this name.

    Raises: DataError with the error in the file, and its position.
    """
    values, origin = _load(path), str(path)
    if isinstance(values, dict) and any(isinstance(inner, list | dict) for inner in values.values()):
        values, origin = _chosen(values, name, path)
    elif name is not None:
        raise DataError(f"{path} is a single histogram and has none named '{name}'")
    if not isinstance(values, list | dict) or not values:
        raise DataError(f"{origin}: expected counts by length ({_FORM}), or several of them by name")
    counts = _counts_of_list(values, origin) if isinstance(values, list) else _counts_by_length(values, origin)
    try:
        return LengthHistogram(counts=counts)
    except PackingError as error:
        raise DataError(f"{origin}: {error}") from error


def _load(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=partial(_refuse_repeats, str(path)))
    except RecursionError as error:
        raise DataError(f"{path}: expected {_FORM}, found brackets nested too deep to be read") from error
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}") from error


def _refuse_repeats(origin: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise DataError(
                f"{origin}: {_shown(key)} occurs twice in one object, with {_shown(values[key])} and {_shown(value)}"
            )
        values[key] = value
    return values


def _chosen(values: dict[str, Any], name: str | None, path: Path) -> tuple[Any, str]:
    """Returns one of several histograms, and its origin."""
    wrong = [key for key, inner in values.items() if not isinstance(inner, list | dict)]
    if wrong:
        raise DataError(f"{path}, {wrong[0]}: expected counts by length ({_FORM}), found {_shown(values[wrong[0]])}")
    if name is None:
        raise DataError(f"{path} holds several histograms: choose one with --name; known: {', '.join(values)}")
    if name not in values:
        raise DataError(f"{path} has no histogram named '{name}'; {nearest(name, list(values))}")
    return values[name], f"{path}, {name}"


def _counts_of_list(values: Sequence[Any], origin: str) -> Int64[np.ndarray, " longest"]:
    if len(values) > MOST_SLOTS:
        raise DataError(f"{origin}: {len(values)} counts, but a length must be {MOST_SLOTS} or less")
    counts = (_count(value, length, origin) for length, value in enumerate(values, 1))
    return np.fromiter(counts, dtype=np.int64, count=len(values))


def _counts_by_length(values: dict[str, Any], origin: str) -> Int64[np.ndarray, " longest"]:
    by_length: dict[int, int] = {}
    for key, value in values.items():
        length = _length(key, origin)
        count = _count(value, length, origin)
        if length in by_length:  # "7" and "07"
            raise DataError(f"{origin}: length {length} occurs twice, with {by_length[length]} and {count}")
        by_length[length] = count
    counts = np.zeros(max(by_length), dtype=np.int64)
    counts[np.array(list(by_length)) - 1] = list(by_length.values())
    return counts


def _length(key: str, origin: str) -> int:
    if key.isdecimal() and len(key) <= _MOST_DIGITS and 1 <= int(key) <= MOST_SLOTS:
        return int(key)
    raise DataError(f"{origin}: a length must be a whole number from 1 to {MOST_SLOTS}, found {_shown(key)}")


def _count(value: Any, length: int, origin: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_SEQUENCES:
        return value
    raise DataError(
        f"{origin}: a count of sequences must be a whole number from 0 to {MOST_SEQUENCES}; length {length} has "
        f"{_shown(value)}"
    )


def _shown(value: Any) -> str:
    """Returns a value in its JSON form, if it is short."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    return f"{json.dumps(value):.40}"
