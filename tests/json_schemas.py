"""Validates values against the part of JSON schema that pydantic writes for sections."""

from collections.abc import Mapping
from typing import Any

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "null": (type(None),),
}


def accepts(schema: Mapping[str, Any], value: Any, root: Mapping[str, Any] | None = None) -> bool:
    """Returns whether `value` satisfies `schema`, as an editor would find."""
    root = schema if root is None else root
    if "$ref" in schema:
        return accepts(root["$defs"][schema["$ref"].rpartition("/")[2]], value, root)
    return (
        _has_type(schema, value)
        and ("const" not in schema or value == schema["const"])
        and ("enum" not in schema or value in schema["enum"])
        and ("anyOf" not in schema or any(accepts(one, value, root) for one in schema["anyOf"]))
        and ("oneOf" not in schema or sum(accepts(one, value, root) for one in schema["oneOf"]) == 1)
        and (not isinstance(value, dict) or _accepts_keys(schema, value, root))
        and (not isinstance(value, list) or all(accepts(schema.get("items", {}), one, root) for one in value))
    )


def _has_type(schema: Mapping[str, Any], value: Any) -> bool:
    if "type" not in schema:
        return True
    is_wrong_bool = isinstance(value, bool) and schema["type"] != "boolean"
    return isinstance(value, _TYPES[schema["type"]]) and not is_wrong_bool


def _accepts_keys(schema: Mapping[str, Any], value: Mapping[str, Any], root: Mapping[str, Any]) -> bool:
    known, further = schema.get("properties", {}), schema.get("additionalProperties", True)
    return set(schema.get("required", ())) <= set(value) and all(
        accepts(known[key], one, root) if key in known else further is not False and accepts(_open(further), one, root)
        for key, one in value.items()
    )


def _open(further: Any) -> Mapping[str, Any]:
    return {} if further is True else further
