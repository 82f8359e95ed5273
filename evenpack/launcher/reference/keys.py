"""From the schema of a file to its keys, in the order of the schema."""

import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic.fields import FieldInfo

from evenpack.config import Section, SectionByKind
from evenpack.launcher.reference.words import default_of, limits_of, meaning_of, type_of, unit_of

NAME = "NAME"
"""Stands in a place for a name of the user's, as that of a source."""
ENTRY = "[]"
"""Follows a key whose value is a list of sections, in the places of their keys."""


_Labelled = tuple[str, type[Section]]
"""A section with its kind; an empty one for a section that stands alone."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One of the sections that may stand at a place, told apart by their `kind`."""

    name: str
    about: str
    """What such a section is for."""


@dataclass(frozen=True, kw_only=True)
class Key:
    """A key of a file: what may stand there, and what it means."""

    place: str
    """Dotted, as in an override: `data.sources.NAME.path`."""
    kinds: tuple[str, ...]
    """Which kinds of the section that it stands in have it; empty: all, or the section has no kinds."""
    type: str
    limits: str | None
    """None: there are none."""
    unit: str | None
    """None: a number without one, or no number."""
    default: str | None
    """As YAML writes it; None: the key is required."""
    meaning: str
    variants: tuple[Kind, ...]
    """The sections that may stand here; empty for a single value and for a section without a `kind`."""
    is_section: bool
    """Whether further keys stand below it."""

    @property
    def name(self) -> str:
        """The last part of the place."""
        return self.place.rpartition(".")[2]

    @property
    def parent(self) -> str:
        """The place of the section that it stands in; empty for a section of the file."""
        return self.place.rpartition(".")[0]

    @property
    def inside(self) -> str:
        """The place in which the keys below it stand."""
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
        return "The only kind that can stand here." if is_lone_kind else meaning_of(field.description)
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
    """Yields the keys of the sections that a place may hold; a key that several kinds share comes once."""
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
    """Returns the key `kind`, which has one value in each of the sections."""
    fields = [section.model_fields["kind"] for _, section in sections]
    return Key(
        place=f"{place}.kind",
        kinds=(),
        type=f"one of {', '.join(label for label, _ in sections)}",
        limits=None,
        unit=None,
        default=next((found for field in fields if (found := default_of(field)) is not None), None),
        meaning="Which of these sections it is, and so which other keys there are.",
        variants=(),
        is_section=False,
    )
