"""Extracts the keys of a file from its schema, in the order of the schema."""

import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic.fields import FieldInfo

from evenpack.config import Section, SectionByKind
from evenpack.launcher.reference.descriptions import default_of, limits_of, meaning_of, type_of, unit_of

NAME = "NAME"
"""Placeholder in a key's path for a name that the user chooses, such as that of a source."""
ENTRY = "[]"
"""Follows a key whose value is a list of sections, in the paths of their keys."""


_Labelled = tuple[str, type[Section]]
"""A section with its kind; the kind is empty for a key with a single kind of section."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One of the sections that a key may hold, distinguished by their `kind`."""

    name: str
    about: str
    """Description of the section."""


@dataclass(frozen=True, kw_only=True)
class Key:
    """A key of a file: its type, limits, default and meaning."""

    place: str
    """Dotted path, as in an override: `data.sources.NAME.path`."""
    kinds: tuple[str, ...]
    """Kinds of the enclosing section that have the key; empty: all kinds, or the section has no kinds."""
    type: str
    limits: str | None
    """Limits of the value; None: there are none."""
    unit: str | None
    """Unit of the value; None: it has no unit, or is not a number."""
    default: str | None
    """Default in YAML's notation; None: the key is required."""
    meaning: str
    variants: tuple[Kind, ...]
    """The kinds of section that the key may hold; empty for a single value and for a section without a `kind`."""
    is_section: bool
    """Whether the key is a section, with keys of its own."""

    @property
    def name(self) -> str:
        """The last part of the dotted path."""
        return self.place.rpartition(".")[2]

    @property
    def parent(self) -> str:
        """The dotted path of the enclosing section; empty for a top-level section."""
        return self.place.rpartition(".")[0]

    @property
    def inside(self) -> str:
        """The dotted path with which the paths of its own keys begin."""
        return f"{self.place}{_STEPS_INTO.get(self.type, '')}"


_STEPS_INTO = {"sections by name": f".{NAME}", "list of sections": ENTRY}


def keys_of(schema: type[Section]) -> tuple[Key, ...]:
    """Returns all keys of a file, each section before the keys in it.

    Raises: ConfigError for a model family that cannot be loaded.
    """
    return tuple(_keys_in(schema, ""))


def _keys_in(schema: type[Section], place: str) -> Iterator[Key]:
    for name, field in schema.model_fields.items():
        here = f"{place}.{name}" if place else name
        sections = _sections_of(field)
        yield (key := _key(here, field, sections))
        yield from _merged(sections, key.inside)


def _key(place: str, field: FieldInfo, sections: Sequence[_Labelled]) -> Key:
    variants = [Kind(name=label, about=meaning_of(section.__doc__)) for label, section in sections if label]
    by_kind = any(isinstance(mark, SectionByKind) for mark in field.metadata)
    return Key(
        place=place,
        kinds=(),
        type="section" if by_kind else type_of(field.annotation),
        limits=limits_of(field),
        unit=unit_of(field),
        default=default_of(field),
        meaning=_meaning(place, field, sections),
        variants=tuple(variants),
        is_section=bool(sections),
    )


def _meaning(place: str, field: FieldInfo, sections: Sequence[_Labelled]) -> str:
    """Returns the docstring of a key, or that of its section if it has none."""
    if field.description or not sections:
        is_lone_kind = place.endswith(".kind") and not field.description
        return "The only kind of this section." if is_lone_kind else meaning_of(field.description)
    return meaning_of(sections[0][1].__doc__)


def _sections_of(field: FieldInfo) -> list[_Labelled]:
    """Returns the sections that a key may hold, also in a mapping or a list, each with its kind."""
    for mark in field.metadata:
        if isinstance(mark, SectionByKind):
            return [(kind, mark.find(kind)) for kind in mark.known()]
    found = list(dict.fromkeys(_sections_in(field.annotation)))
    return [(_kind_of(section) if len(found) > 1 else "", section) for section in found]


def _sections_in(annotation: Any) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for part in typing.get_args(annotation):
        yield from _sections_in(part)


def _kind_of(section: type[Section]) -> str:
    return str(typing.get_args(section.model_fields["kind"].annotation)[0])


def _merged(sections: Sequence[_Labelled], place: str) -> Iterator[Key]:
    """Yields the keys of the sections that a key may hold; a key that several kinds share is yielded once."""
    if len(sections) > 1:
        yield _choice(sections, place)
    kinds_of: dict[Key, list[str]] = {}
    for label, section in sections:
        for key in _keys_in(section, place):
            if not (label and key.name == "kind" and key.parent == place):
                kinds_of.setdefault(key, []).append(label)
    for key, kinds in kinds_of.items():
        yield key if key.kinds or len(kinds) == len(sections) else replace(key, kinds=tuple(kinds))


def _choice(sections: Sequence[_Labelled], place: str) -> Key:
    """Returns the key `kind`, which has a different value in each of the sections."""
    fields = [section.model_fields["kind"] for _, section in sections]
    return Key(
        place=f"{place}.kind",
        kinds=(),
        type=f"one of {', '.join(label for label, _ in sections)}",
        limits=None,
        unit=None,
        default=next((found for field in fields if (found := default_of(field)) is not None), None),
        meaning="The kind of the section, on which its other keys depend.",
        variants=(),
        is_section=False,
    )
