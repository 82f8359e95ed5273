"""One run file in YAML becomes one frozen, checked object; every mistake names the nearest right word."""

import difflib
import re
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from evenpack.errors import ConfigError


class Section(BaseModel):
    """Base of every section of a run file: frozen, no unknown keys, numbers finite."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        validate_default=True,
    )


SectionT = TypeVar("SectionT", bound=Section)


def load_run_file(path: Path, schema: type[SectionT], overrides: Sequence[str] = ()) -> SectionT:
    """Reads a run file, applies `section.key=value` overrides and checks everything.

    Raises: ConfigError with the place, what was expected and what came.
    """
    if not path.is_file():
        raise ConfigError(f"run file {path} does not exist")
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_RunFileLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not readable YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold sections such as 'run:' and 'data:', found {type(values).__name__}")
    for override in overrides:
        _apply_override(values, override, schema)
    return validate(values, schema, origin=str(path))


def validate(values: dict[str, Any], schema: type[SectionT], *, origin: str) -> SectionT:
    """Checks `values` against `schema`; `origin` opens the error message."""
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        lines = [_explain(detail, schema) for detail in error.errors(include_url=False)]
        raise ConfigError("\n".join([f"{origin}:", *(f"  {line}" for line in lines)])) from error


def nearest(word: str, known: Sequence[str]) -> str:
    """A hint for an unknown word: the nearest known one, and the whole list."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    hint = f"did you mean '{close[0]}'? " if close else ""
    return f"{hint}known: {', '.join(sorted(known))}"


class _RunFileLoader(yaml.SafeLoader):
    """YAML 1.2 floats ('6e-4' is a number), and a key given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key '{key}' is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_FLOAT = r"^[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?$"
_RunFileLoader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(_FLOAT), list("-+0123456789."))


def _apply_override(values: dict[str, Any], override: str, schema: type[Section]) -> None:
    """Sets one `a.b.c=value`; the key must exist in the schema, a source in the file."""
    name, separator, text = override.partition("=")
    if not separator or not name:
        raise ConfigError(f"override '{override}' is not of the form section.key=value")
    try:
        value = yaml.load(text, Loader=_RunFileLoader) if text else None
    except yaml.YAMLError as error:
        raise ConfigError(f"override '{override}': the value is not readable YAML: {error}") from error
    *parents, last = name.split(".")
    place: Any = values
    kinds: list[Any] = [schema]
    for depth, key in enumerate([*parents, last]):
        known = _known_keys(kinds, place)
        if known is not None and key not in known:
            where = ".".join(name.split(".")[:depth]) or "the run file"
            raise ConfigError(f"override '{override}': '{where}' has no key '{key}'; {nearest(key, known)}")
        if depth == len(parents):
            place[key] = value
            return
        kinds = _children(kinds, key)
        if place.get(key) is None:
            place[key] = {}
        place = place[key]
        if not isinstance(place, dict):
            raise ConfigError(f"override '{override}': '{'.'.join(parents)}' is a single value, not a section")


def _known_keys(kinds: list[Any], place: dict[str, Any]) -> list[str] | None:
    """Keys allowed here: a section's fields, a named mapping's present names, or None for anything."""
    sections = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]
    if sections:
        return sorted({name for section in sections for name in section.model_fields})
    if any(typing.get_origin(kind) is dict and typing.get_args(kind)[1] is not Any for kind in kinds):
        return list(place)
    return None


def _children(kinds: list[Any], key: str) -> list[Any]:
    """The types that may stand under `key`, unions and annotations opened."""
    found: list[Any] = []
    for kind in kinds:
        if isinstance(kind, type) and issubclass(kind, Section):
            if key in kind.model_fields:
                found += _open_union(kind.model_fields[key].annotation)
        elif typing.get_origin(kind) is dict:
            found += _open_union(typing.get_args(kind)[1])
    return found


def _open_union(kind: Any) -> list[Any]:
    origin = typing.get_origin(kind)
    if origin is typing.Annotated:
        return _open_union(typing.get_args(kind)[0])
    if origin in (typing.Union, types.UnionType):
        return [part for choice in typing.get_args(kind) for part in _open_union(choice)]
    return [kind]


def _explain(detail: Any, schema: type[Section]) -> str:
    """One pydantic error as: place, what was expected, what came."""
    location = [str(part) for part in detail["loc"]]
    kinds: list[Any] = [schema]
    place: list[str] = []
    for part in location[:-1]:
        children = _children(kinds, part)
        if children:  # discriminator tags of unions have no children: they are no keys of the file
            kinds = children
            place.append(part)
    last = location[-1] if location else ""
    name = ".".join([*place, last])
    if detail["type"] == "extra_forbidden":
        chosen = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]
        tags = set(location)
        tagged = [kind for kind in chosen if _tag(kind) in tags]
        known = sorted({field for kind in tagged or chosen for field in kind.model_fields})
        return f"{name}: no such key; {nearest(last, known)}"
    message = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "missing":
        return f"{name}: this key is required"
    if detail["type"] == "value_error":
        return f"{name}: {message}" if name else message
    return f"{name}: {message}, found {detail['input']!r}"


def _tag(kind: type[Section]) -> str | None:
    """The discriminating value of a section's `kind` field, if it has one."""
    field = kind.model_fields.get("kind")
    choices = typing.get_args(field.annotation) if field is not None else ()
    return str(choices[0]) if len(choices) == 1 else None
