"""Compares run files and other nested mappings, and names the keys whose values differ."""

from collections.abc import Mapping
from typing import Any


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns each single value of nested mappings by its dotted key, in their order; an empty mapping has none.

    Args:
        prefix: what each key begins with.
    """
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def differences(one: Mapping[str, Any], other: Mapping[str, Any], *, absent: Any = None) -> dict[str, tuple[Any, Any]]:
    """Returns the dotted keys whose values differ, sorted, with both values. A key that is absent has the value None.

    Args:
        absent: what to return in place of the value of such a key.
    """
    first, second = flatten(one), flatten(other)
    return {
        key: (first.get(key, absent), second.get(key, absent))
        for key in sorted(first.keys() | second.keys())
        if first.get(key) != second.get(key)
    }


def as_text(value: Any) -> str:
    """Returns a value of a run file for people."""
    return "null" if value is None else str(value)
