"""What the keys of YAML files mean, derived from their schemas: for a terminal, and as JSON schema."""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pkgutil import resolve_name
from typing import Any

from pydantic import ByteSize, TypeAdapter
from rich.console import RenderableType
from rich.table import Table

from evenpack.config import Section, nearest, usual_keys
from evenpack.console import pairs, table, text
from evenpack.errors import ConfigError
from evenpack.units import UNIT_IN_SCHEMA
from evenpack.yaml_text import quoted

FILES = {
    "run": "evenpack.engine.config:RunConfig",
    "finetune": "evenpack.finetuning.config:FinetuneConfig",
    "equivalence": "evenpack.studies.equivalence.config:EquivalenceConfig",
    "chunking": "evenpack.studies.chunking.config:ChunkingConfig",
}
"""The schema of each kind of file, by the name that `--file` takes; it is imported when it is asked for."""

NAME = "NAME"
"""Placeholder in a key's path for a name that the user chooses, such as a source's name."""
ENTRY = "[]"
"""Follows a key whose value is a list of sections, in the paths of their keys."""

_Node = Mapping[str, Any]
"""A part of a JSON schema."""

_PLAIN = {
    "boolean": "true or false",
    "integer": "whole number",
    "number": "number",
    "string": "text",
    None: "any value",
}
"""Words for the types of JSON schema; None: a node without a type."""
_PLURAL = {
    "whole number": "whole numbers",
    "number": "numbers",
    "pair of whole numbers": "pairs of whole numbers",
    "path": "paths",
    "section": "sections",
    "any value": "values",
}
_OR = ", or "
"""Separates the types of a union."""
_BY_NAME = " by name"
_LARGE = 1 << 20
"""Powers of two from this number on are written as 2^N."""
_SIZE_PATTERN = TypeAdapter(ByteSize).json_schema()["anyOf"][0]["pattern"]
"""The pattern by which text such as 4GiB shows in a schema."""


def schema_of(file: str) -> type[Section]:
    """Returns the schema of a kind of file. Raises: ConfigError if there is no such kind."""
    if file not in FILES:
        raise ConfigError(f"--file {file}: there is no such kind of file; {nearest(file, tuple(FILES))}")
    return resolve_name(FILES[file])


def json_schema(file: str) -> dict[str, Any]:
    """Returns the JSON schema of a kind of file, for editors.

    It covers types, limits and kinds; consistency checks between keys are in evenpack only.

    Raises: ConfigError if there is no such kind, or for a model family that cannot be loaded.
    """
    schema: dict[str, Any] = _without_units(schema_of(file).model_json_schema())
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _without_units(node: Any) -> Any:
    if isinstance(node, list):
        return [_without_units(part) for part in node]
    if not isinstance(node, dict):
        return node
    return {name: _without_units(part) for name, part in node.items() if name != UNIT_IN_SCHEMA}


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
    kinds: tuple[str, ...] = ()
    """Kinds of the enclosing section that have the key; empty: all kinds, or the section has no kinds."""
    type: str
    limits: str | None = None
    """Limits of the value; None: there are none."""
    unit: str | None = None
    """Unit of the value; None: it has no unit, or is not a number."""
    default: str | None
    """Default in YAML's notation; None: the key is required."""
    meaning: str
    variants: tuple[Kind, ...] = ()
    """The kinds of section that the key may hold; empty for a single value and for a section without a `kind`."""
    is_section: bool = False
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
    document = schema.model_json_schema()
    return tuple(_Reader(document.get("$defs", {})).keys_in(document, ""))


class _Reader:
    """Reads the keys of a JSON schema, in its order."""

    def __init__(self, definitions: Mapping[str, _Node]) -> None:
        self._definitions = definitions

    def keys_in(self, section: _Node, place: str) -> Iterator[Key]:
        for name, node in section["properties"].items():
            sections = self._sections(node)
            key = self._key(f"{place}.{name}" if place else name, node, sections)
            yield key if name not in section.get("required", ()) else replace(key, default=None)
            yield from self._merged(sections, key.inside)

    def _key(self, place: str, node: _Node, sections: Sequence[_Node]) -> Key:
        is_size = any(choice.get("pattern") == _SIZE_PATTERN for choice in self._choices(node))
        kinds = sections if len(sections) > 1 else ()
        return Key(
            place=place,
            kinds=(),
            type="whole number, or text such as 4GiB" if is_size else self._type(node),
            limits=_limits([{"minimum": node["ge"]}] if is_size and "ge" in node else [node, *self._choices(node)]),
            unit="bytes" if is_size else _unit(node),
            default=_default(node, sections, is_size=is_size),
            meaning=_meaning(place, node, sections),
            variants=tuple(Kind(name=_kind_of(one), about=_paragraph(one.get("description", ""))) for one in kinds),
            is_section=bool(sections),
        )

    def _choices(self, node: _Node) -> list[_Node]:
        """Returns the parts of a union, which are not references any more, and not null."""
        if "$ref" in node:
            return self._choices(self._definitions[node["$ref"].rpartition("/")[2]])
        parts = node.get("anyOf", node.get("oneOf"))
        if parts is None:
            return [] if node.get("type") == "null" else [node]
        return [choice for part in parts for choice in self._choices(part)]

    def _sections(self, node: _Node) -> list[_Node]:
        """Returns the sections that a key may hold, also in a mapping or a list."""
        found: list[_Node] = []
        for choice in self._choices(node):
            inner = _inner(choice)
            sections = [choice] if "properties" in choice else self._sections(inner) if inner else []
            found += [section for section in sections if section not in found]
        return found

    def _type(self, node: _Node) -> str:
        """Returns words for a type: `whole number`, `one of packed, unpadded`, or `path, or list of paths`.

        Null is not mentioned; the default shows where it is allowed.
        """
        return _OR.join(dict.fromkeys(map(self._type_of_one, self._choices(node))))

    def _type_of_one(self, node: _Node) -> str:
        if "properties" in node:
            return "section"
        if "const" in node:
            return str(node["const"])
        if "enum" in node:
            return f"one of {', '.join(map(str, node['enum']))}"
        if node.get("type") == "object":
            inner = self._type(_inner(node))
            return f"{inner}, for each name" if inner.endswith(_BY_NAME) else _plural(inner) + _BY_NAME
        if node.get("type") == "array":
            return f"{'pair' if 'prefixItems' in node else 'list'} of {_plural(self._type(_inner(node)))}"
        return "path" if node.get("format") == "path" else _PLAIN[node.get("type")]

    def _merged(self, sections: Sequence[_Node], place: str) -> Iterator[Key]:
        """Yields the keys of the sections that a key may hold; a key that several kinds share is yielded once."""
        if len(sections) > 1:
            yield _choice_of_kinds(sections, place)
        kinds_of: dict[Key, list[str]] = {}
        for section in sections:
            for key in self.keys_in(section, place):
                if len(sections) == 1 or key.place != f"{place}.kind":
                    kinds_of.setdefault(key, []).append(_kind_of(section))
        for key, kinds in kinds_of.items():
            yield key if key.kinds or len(kinds) == len(sections) else replace(key, kinds=tuple(kinds))


def _kind_of(section: _Node) -> str:
    return str(section["properties"].get("kind", {}).get("const", ""))


def _inner(node: _Node) -> _Node:
    """Returns the values of a mapping, or the entries of a list; empty for any other type, and for any values."""
    by_pattern = node.get("patternProperties", {})
    found = [*node.get("prefixItems", ()), node.get("items"), node.get("additionalProperties"), *by_pattern.values()]
    return next((inner for inner in found if isinstance(inner, Mapping)), {})


def _limits(nodes: Sequence[_Node]) -> str | None:
    """Returns the range of a number, or the fewest entries of a list; None if there is no limit."""
    words = {
        "minimum": "at least {}",
        "exclusiveMinimum": "above {}",
        "maximum": "at most {}",
        "exclusiveMaximum": "below {}",
        "minItems": "at least {} of them",
        "minProperties": "at least {} of them",
    }
    given = {name: node[name] for node in nodes if "prefixItems" not in node for name in words if name in node}
    return ", ".join(word.format(_number(given[name])) for name, word in words.items() if name in given) or None


def _unit(node: _Node) -> str | None:
    """Returns the unit of a number, or of the numbers of a list; None if it has none."""
    if UNIT_IN_SCHEMA in node:
        return str(node[UNIT_IN_SCHEMA])
    parts = [*node.get("anyOf", ()), *([_inner(node)] if _inner(node) else [])]
    return next(filter(None, map(_unit, parts)), None)


def _default(node: _Node, sections: Sequence[_Node], *, is_size: bool) -> str:
    """Returns the default in YAML's notation; one that a function makes is an empty mapping."""
    value = node.get("default", {})
    if is_size and value is not None:
        return ByteSize(value).human_readable(separator="").replace(".0", "")
    if isinstance(value, dict) and "kind" in value and len(sections) > 1:
        return f"{{kind: {value['kind']}}}"
    return "{}" if isinstance(value, dict) else _value(value)


def _meaning(place: str, node: _Node, sections: Sequence[_Node]) -> str:
    """Returns the docstring of a key, or of its section if it has none."""
    if "description" in node or not sections:
        is_lone_kind = place.endswith(".kind") and "description" not in node
        return "The only kind of this section." if is_lone_kind else _paragraph(node.get("description", ""))
    return _paragraph(sections[0].get("description", ""))


def _choice_of_kinds(sections: Sequence[_Node], place: str) -> Key:
    """Returns the key `kind`, which has a different value in each of the sections."""
    kinds = [section["properties"]["kind"] for section in sections]
    return Key(
        place=f"{place}.kind",
        type=f"one of {', '.join(map(_kind_of, sections))}",
        default=next((kind["default"] for kind in kinds if "default" in kind), None),
        meaning="The kind of the section, on which its other keys depend.",
    )


def _paragraph(text: str) -> str:
    return " ".join(text.split())


def _plural(words: str) -> str:
    return _OR.join(_PLURAL.get(word, word) for word in words.split(_OR))


def _number(limit: Any) -> str:
    if isinstance(limit, int) and limit >= _LARGE and limit.bit_count() == 1:
        return f"2^{limit.bit_length() - 1}"
    return f"{limit:,}" if isinstance(limit, int) else f"{limit:g}"


def _value(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return f"[{', '.join(map(_value, value))}]" if isinstance(value, list) else str(value)


_MOST_HINTS = 4


def find_keys(keys: Sequence[Key], place: str) -> tuple[Key, ...]:
    """Returns the keys at `place`: several if a key of this name differs between the kinds of its section.

    Where there is none, it returns those that are usually called so, or the keys of this name in any section.

    Args:
        place: dotted path; any name may be given where the user chooses one, such as a source's name.

    Raises: ConfigError, with similar keys, if there is none.
    """
    asked = _parts(place)
    found = tuple(key for key in keys if _matches(asked, key.place) or _matches(asked, key.inside))
    found = found or tuple(key for key in keys if key.place in usual_keys(asked[-1]))
    found = found or tuple(key for key in keys if place.replace("-", "_") == key.name)
    if not found or len({key.place for key in found}) > _MOST_HINTS:
        raise ConfigError(f"there is no key {quoted(place)}; {_hint(keys, asked)}")
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
    """Returns a hint that names keys with a similar last part, or a similar path."""
    places = list(dict.fromkeys(key.place for key in keys))
    name = difflib.get_close_matches(asked[-1], {place.rpartition(".")[2] for place in places}, n=1, cutoff=0.7)
    alike = [place for place in places if place.rpartition(".")[2] in name]
    near = difflib.get_close_matches(".".join(asked), places, n=_MOST_HINTS, cutoff=0.6)
    hints = [place.replace(ENTRY, "") for place in dict.fromkeys([*alike, *near])][:_MOST_HINTS]
    return f"did you mean {', or '.join(hints)}?" if hints else "`evenpack config explain` lists all keys"


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
        shown += _section(keys, key) if key.is_section else [_key_table(key)]
    return shown


def type_and_limits(key: Key) -> str:
    """Returns the type of a key with its limits."""
    return f"{key.type}, {key.limits}" if key.limits else key.type


def _key_table(key: Key) -> Table:
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
