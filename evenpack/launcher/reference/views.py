"""Shows the reference of keys as tables for a terminal."""

from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table

from evenpack.console import pairs, table, text
from evenpack.launcher.reference.keys import Key
from evenpack.launcher.reference.lookup import find_keys, keys_below

REQUIRED = "required"


def outline(keys: Sequence[Key]) -> Table:
    """Returns a table of all keys of a file, indented by section."""
    return table([{"key": "  " * key.place.count(".") + key.name, **_columns(key)} for key in keys])


def explained(keys: Sequence[Key], place: str) -> list[RenderableType]:
    """Returns tables about a key, or about a section and its keys.

    Raises: ConfigError if there is no such key.
    """
    shown: list[RenderableType] = []
    for key in find_keys(keys, place):
        shown += _section(keys, key) if key.is_section else [_key(key)]
    return shown


def type_and_limits(key: Key) -> str:
    """Returns the type of a key with its limits."""
    return f"{key.type}, {key.limits}" if key.limits else key.type


def _key(key: Key) -> Table:
    values = {
        "type": type_and_limits(key),
        "unit": key.unit,
        "default": key.default or REQUIRED,
        "of": ", ".join(key.kinds) or None,
        "meaning": key.meaning,
    }
    return pairs({name: value for name, value in values.items() if value}, title=key.place)


def _section(keys: Sequence[Key], section: Key) -> list[RenderableType]:
    default = f"default {section.default}" if section.default else REQUIRED
    shown: list[RenderableType] = [
        text(section.inside, bold=True),
        text(f"{section.meaning} ({section.type}, {default})"),
    ]
    if section.variants:
        shown.append(pairs({kind.name: kind.about for kind in section.variants}, title="kind"))
    below = keys_below(keys, section)
    shown.append(table([{"key": key.name, **_columns(key), "meaning": key.meaning} for key in below]))
    return shown


def _columns(key: Key) -> dict[str, str]:
    return {
        "of": ", ".join(key.kinds),
        "type": type_and_limits(key),
        "unit": key.unit or "",
        "default": key.default or REQUIRED,
    }
