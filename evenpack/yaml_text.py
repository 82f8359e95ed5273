"""The YAML of run files and overrides: any error of reading is one short message."""

import re
import reprlib
from copy import deepcopy
from functools import lru_cache
from typing import Any

import yaml

from evenpack.errors import ConfigError

_MOST_VALUES = 100_000
"""Values of a run file, with aliases expanded: a few lines of aliases can represent a billion values."""

_MOST_COLUMNS = 160
"""Columns of a value in a message."""


def quoted(value: Any) -> str:
    """Returns the value for a message: one line at most, however large it is."""
    brief = reprlib.Repr()
    brief.maxlevel, brief.maxstring, brief.maxother = 3, _MOST_COLUMNS, _MOST_COLUMNS
    return cut(brief.repr(value))


def cut(text: str) -> str:
    """Returns the user's text, cut for a message."""
    return text if len(text) <= _MOST_COLUMNS else f"{text[: _MOST_COLUMNS - 4]} ..."


class _RunFileLoader(yaml.SafeLoader):
    """Numbers of YAML 1.2 ('6e-4' is one, 1:30 is text); dates stay text, and a key given twice is an error.

    Beyond it 1_000 and 0b11 are numbers, and yes, no, on and off are true and false, as in YAML 1.1.
    """

    def construct_document(self, node: yaml.Node) -> Any:
        _require_finite(node)
        return super().construct_document(node)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
            kind = node.tag.rpartition(":")[2]
            raise _refusal(f"{quoted(node.value)} cannot be read as {kind}", node) from error

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        text = str(self.construct_scalar(node))
        sign, digits = "-" * text.startswith("-"), text.lstrip("+-")
        if re.fullmatch("0[0-9_]+", digits):
            decimal = sign + (digits.replace("_", "").lstrip("0") or "0")
            raise _refusal(
                f"{text} begins with 0, which YAML 1.1 reads as octal and YAML 1.2 as {decimal}: write {decimal}, or "
                f"'{text}' in quotes for text",
                node,
            )
        if digits.startswith("0o"):  # of YAML 1.2
            return int(text.replace("_", ""), 8)
        return int(super().construct_yaml_int(node))

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise _refusal(f"a key must be text, found {quoted(key)}", key_node)
            if key in seen:
                raise _refusal(f"key {quoted(key)} is given twice", key_node)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _refusal(problem: str, node: yaml.Node) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def _require_finite(root: yaml.Node) -> None:
    """Refuses a document whose aliases expand to too many values, or to infinitely many."""
    sizes: dict[int, int | None] = {}

    def size(node: yaml.Node) -> int:
        if id(node) not in sizes:
            sizes[id(node)] = None  # in progress: if it is met again, it contains itself
            parts = node.value if isinstance(node, yaml.CollectionNode) else ()
            inner = (part for pair in parts for part in (pair if isinstance(pair, tuple) else (pair,)))
            sizes[id(node)] = 1 + sum(size(part) for part in inner)
        found = sizes[id(node)]
        if found is None:
            raise _refusal("an alias refers to a value that contains it", node)
        return found

    if size(root) > _MOST_VALUES:
        raise _refusal(f"it represents {size(root):,} values with its aliases expanded; at most {_MOST_VALUES:,}", root)


_FLOAT = r"^[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?$"
_INTEGER = r"^[-+]?(?:0b[01_]+|0o[0-7_]+|0x[0-9a-fA-F_]+|[0-9][0-9_]*)$"
_SPECIAL_FLOAT = r"^(?:[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
_RunFileLoader.yaml_implicit_resolvers = {  # a run may be named 2026-11-22 or 12:30
    letter: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":timestamp", ":int", ":float"))]
    for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _kind, _pattern in (("int", _INTEGER), ("float", _FLOAT), ("float", _SPECIAL_FLOAT)):
    _RunFileLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(_pattern), list("-+0123456789."))
_RunFileLoader.add_constructor("tag:yaml.org,2002:int", _RunFileLoader.construct_yaml_int)


def read_yaml(text: str, problem: str) -> Any:
    """Returns the value of the text. Raises: ConfigError that begins with `problem`."""
    try:
        return deepcopy(_parsed(text))  # the caller's own, to change
    except yaml.YAMLError as error:
        raise ConfigError(f"{problem}: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{problem}: brackets are nested too deeply") from error


@lru_cache(maxsize=1024)
def _parsed(text: str) -> Any:
    """Caches values: a study reads one run file and the same overrides for each run; parsing took 90 % of its start."""
    return yaml.load(text, Loader=_RunFileLoader)
