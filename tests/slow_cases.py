"""Marks cases of a parametrised test as slow where others imply them."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_but(quick: Collection[object], cases: Iterable[Any]) -> list[Any]:
    """Returns the cases for `pytest.mark.parametrize`, slow but those whose value, or first value, `quick` holds."""
    marked = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        marked.append(pytest.param(*values, marks=[] if values[0] in quick else [pytest.mark.slow]))
    assert sum(not one.marks for one in marked) >= len(quick), f"not all of {quick} are cases"
    return marked
