"""Finds keys by their dotted path, and similar ones if there is no such key."""

import difflib
import re
from collections.abc import Sequence

from evenpack.config import RENAMED_KEYS, usual_keys
from evenpack.errors import ConfigError
from evenpack.launcher.reference.keys import ENTRY, NAME, Key
from evenpack.yaml_text import shown

_MOST_HINTS = 4


def find_keys(keys: Sequence[Key], place: str) -> tuple[Key, ...]:
    """Returns the keys at `place`: several if a key of this name differs between the kinds of its section.

    Args:
        place: dotted path; any name may be given where the user chooses one, such as that of a source.

    Raises: ConfigError, with similar keys, if there is none.
    """
    if place in RENAMED_KEYS:
        raise ConfigError(f"{place} was renamed: it is now {RENAMED_KEYS[place]}")
    asked = _parts(place)
    found = tuple(key for key in keys if _matches(asked, key.place) or _matches(asked, key.inside))
    if not found:
        raise ConfigError(f"there is no key {shown(place)}; {_hint(keys, asked)}")
    return found


def keys_at(keys: Sequence[Key], place: str | None) -> tuple[Key, ...]:
    """Returns what `find_keys` finds, with the keys directly in it if it is a section; all keys if `place` is None.

    Raises: ConfigError, with similar keys, if there is none.
    """
    if place is None:
        return tuple(keys)
    return tuple(one for key in find_keys(keys, place) for one in (key, *keys_below(keys, key)))


def keys_below(keys: Sequence[Key], section: Key) -> tuple[Key, ...]:
    """Returns the keys directly in a section."""
    return tuple(key for key in keys if key.parent == section.inside)


def _parts(place: str) -> list[str]:
    return re.sub(r"\[\d*\]", "", place).split(".")


def _matches(asked: Sequence[str], place: str) -> bool:
    parts = _parts(place)
    return len(parts) == len(asked) and all(part in (given, NAME) for part, given in zip(parts, asked, strict=True))


def _hint(keys: Sequence[Key], asked: Sequence[str]) -> str:
    """Returns a hint that names keys usually called so, then those with a similar last part, or a similar path."""
    places = list(dict.fromkeys(key.place for key in keys))
    usual = [place for place in usual_keys(asked[-1]) if place in places]
    name = difflib.get_close_matches(asked[-1], {place.rpartition(".")[2] for place in places}, n=1, cutoff=0.7)
    alike = [place for place in places if place.rpartition(".")[2] in name]
    near = difflib.get_close_matches(".".join(asked), places, n=_MOST_HINTS, cutoff=0.6)
    hints = [place.replace(ENTRY, "") for place in dict.fromkeys(usual or [*alike, *near])][:_MOST_HINTS]
    return f"did you mean {', or '.join(hints)}?" if hints else "`evenpack config explain` lists all keys"
