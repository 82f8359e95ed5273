"""Describes a key's type, limits, unit and default in words."""

import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel, ByteSize
from pydantic.fields import FieldInfo

from evenpack.config import SectionByKind
from evenpack.units import Unit

_PLAIN = {
    bool: "true or false",
    int: "whole number",
    float: "number",
    str: "text",
    Path: "path",
    ByteSize: "whole number, or text such as 4GiB",
    Any: "any value",
}
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


def type_of(annotation: Any) -> str:
    """Returns the type of a key: `whole number`, `one of packed, unpadded`, or `path, or list of paths`.

    Null is not mentioned; the default shows where it is allowed.
    """
    parts = list(dict.fromkeys(_type_of_one(one) for one in _choices(annotation)))
    return _OR.join(part for part in parts if part)


def unit_of(field: FieldInfo) -> str | None:
    """Returns the unit of a number, or of the numbers of a list; None if it has none."""
    if _bare(field.annotation) is ByteSize:
        return "bytes"
    marks = [*field.metadata, *_marks_within(field.annotation)]
    return next((mark.name for mark in marks if isinstance(mark, Unit)), None)


def limits_of(field: FieldInfo) -> str | None:
    """Returns the range of a number, or the fewest entries of a list; None if there is no limit."""
    lower, upper, fewest = None, None, None
    for mark in _marks(field):
        if isinstance(mark, Ge):
            lower = f"at least {_number(mark.ge)}"
        elif isinstance(mark, Gt):
            lower = f"above {_number(mark.gt)}"
        elif isinstance(mark, Le):
            upper = f"at most {_number(mark.le)}"
        elif isinstance(mark, Lt):
            upper = f"below {_number(mark.lt)}"
        elif isinstance(mark, MinLen) and _bare(field.annotation) is not str:
            fewest = f"at least {mark.min_length} of them"
    return ", ".join(part for part in (lower, upper, fewest) if part) or None


def default_of(field: FieldInfo) -> str | None:
    """Returns the default in YAML's notation; None if the key is required."""
    if field.is_required():
        return None
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        is_one_of_many = len(list(_choices(field.annotation))) > 1
        return f"{{kind: {dict(value)['kind']}}}" if is_one_of_many else "{}"
    return _value(value)


def meaning_of(text: str | None) -> str:
    """Returns a docstring as one paragraph."""
    return " ".join((text or "").split())


def _choices(annotation: Any) -> Iterator[Any]:
    """Yields the types of a union without their annotations, and without None."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        if any(isinstance(mark, SectionByKind) for mark in typing.get_args(annotation)):
            yield BaseModel
            return
        yield from _choices(typing.get_args(annotation)[0])
    elif origin in (typing.Union, types.UnionType):
        for part in typing.get_args(annotation):
            yield from _choices(part)
    elif annotation is not type(None):
        yield annotation


def _type_of_one(kind: Any) -> str:
    if typing.get_origin(kind) is not None:
        return _type_of_generic(kind)
    is_section = isinstance(kind, type) and issubclass(kind, BaseModel)
    return "section" if is_section else _PLAIN[kind]


def _type_of_generic(kind: Any) -> str:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        choices = ", ".join(map(str, arguments))
        return f"one of {choices}" if len(arguments) > 1 else choices
    if origin is dict:
        inner = type_of(arguments[1])
        return f"{inner}, for each name" if inner.endswith(_BY_NAME) else _plural(inner) + _BY_NAME
    if origin is tuple and arguments[-1] is not Ellipsis:
        return f"pair of {_plural(type_of(arguments[0]))}"
    return f"list of {_plural(type_of(arguments[0]))}"


def _plural(words: str) -> str:
    return _OR.join(_PLURAL.get(word, word) for word in words.split(_OR))


def _bare(annotation: Any) -> Any:
    return next(_choices(annotation), None)


def _marks(field: FieldInfo) -> Iterator[Any]:
    """Yields the annotations of a field, and of the types of its union."""
    yield from field.metadata
    if typing.get_origin(field.annotation) in (typing.Union, types.UnionType):
        for part in typing.get_args(field.annotation):
            if typing.get_origin(part) is typing.Annotated:
                yield from _opened(part)


def _marks_within(annotation: Any) -> Iterator[Any]:
    """Yields the annotations of a type and of all types in it."""
    if typing.get_origin(annotation) is typing.Annotated:
        yield from _opened(annotation)
    for part in typing.get_args(annotation):
        yield from _marks_within(part)


def _opened(annotated: Any) -> Iterator[Any]:
    for mark in annotated.__metadata__:
        yield from mark.metadata if isinstance(mark, FieldInfo) else (mark,)


def _number(limit: Any) -> str:
    if isinstance(limit, int) and limit >= _LARGE and limit.bit_count() == 1:
        return f"2^{limit.bit_length() - 1}"
    return f"{limit:,}" if isinstance(limit, int) else f"{limit:g}"


def _value(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, ByteSize):
        return value.human_readable(separator="").replace(".0", "")
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    return "{}" if value == {} else str(value)
