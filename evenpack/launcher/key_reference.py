"""What the keys of YAML files mean, derived from their schemas: for a terminal, for docs/, and as JSON schema."""

import difflib
import re
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel, ByteSize
from pydantic.fields import FieldInfo
from rich.console import RenderableType
from rich.table import Table

from evenpack.config import RENAMED_KEYS, Section, SectionByKind, nearest, usual_keys
from evenpack.console import pairs, table, text
from evenpack.errors import ConfigError
from evenpack.units import Unit
from evenpack.yaml_text import shown


def _run() -> type[Section]:
    from evenpack.engine.config import RunConfig

    return RunConfig


def _finetune() -> type[Section]:
    from evenpack.finetuning.config import FinetuneConfig

    return FinetuneConfig


def _equivalence() -> type[Section]:
    from evenpack.studies.equivalence.config import EquivalenceConfig

    return EquivalenceConfig


def _chunking() -> type[Section]:
    from evenpack.studies.chunking.config import ChunkingConfig

    return ChunkingConfig


def _shuffle() -> type[Section]:
    from evenpack.studies.shuffle.config import ShuffleStudyConfig

    return ShuffleStudyConfig


RUN_FILE = "run"

FILES: dict[str, Callable[[], type[Section]]] = {
    RUN_FILE: _run,
    "finetune": _finetune,
    "equivalence": _equivalence,
    "chunking": _chunking,
    "shuffle": _shuffle,
}
"""Functions that import a schema, by the name that `--file` takes."""


def schema_of(file: str) -> type[Section]:
    """Returns the schema of a kind of file. Raises: ConfigError if there is no such kind."""
    if file not in FILES:
        raise ConfigError(f"--file {file}: there is no such kind of file; {nearest(file, tuple(FILES))}")
    return FILES[file]()


def json_schema(file: str) -> dict[str, Any]:
    """Returns the JSON schema of a kind of file, for editors.

    It covers types, limits and kinds; consistency checks between keys are in evenpack only.

    Raises: ConfigError if there is no such kind, or for a model family that cannot be loaded.
    """
    schema = schema_of(file)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema.model_json_schema()}


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


_RUN_FILE = """\
# The run file

One YAML file describes one run. This page lists every key, in the order of the file, with its type, unit and default.
The following commands show the same:

```
evenpack config explain                          all keys
evenpack config explain data.recipe              a section
evenpack config explain training.packs_per_step  a key
```

Every key can be set on the command line, too: `evenpack train RUN.yaml training.steps=100`.

Values are read as in YAML 1.2: `6e-4` is a number, `1:30` and `2026-11-22` are text. A number that begins with 0 is
refused, because versions of YAML read 010 as 8 or as 10. As in YAML 1.1, `yes`, `no`, `on` and `off` are true and
false, and `1_000` is a number: write text that looks like one of these in quotes.

Editors can complete and check keys with a JSON schema. Write it with

```
evenpack config schema > run_file.schema.json
```

and name it in the first line of a run file:

```yaml
# yaml-language-server: $schema=run_file.schema.json
```

*NAME* stands for a name of your choice. The keys of a section with a `kind` depend on the kind: the column "of" lists
the kinds that have a key, and is empty if all have it. The default `{}` means a section with all its defaults.
"""

_OTHER_FILES = """\
# Files of fine-tunings and studies

`evenpack finetune` and the studies of runs read YAML files of their own. `evenpack config explain --file KIND` shows
their keys, and `evenpack config schema --file KIND` writes the JSON schema for editors. In files of studies, `settings`
and `arms` hold [keys of the run file](run_file.md) as on the command line, for example `training.steps: 100`.
"""

_TITLES = {
    "finetune": "Fine-tuning (`--file finetune`)",
    "equivalence": "Study of equivalence (`--file equivalence`)",
    "chunking": "Study of chunking (`--file chunking`)",
    "shuffle": "Study of shuffles (`--file shuffle`)",
}


def pages() -> dict[str, str]:
    """Returns the pages by their names in the folder docs/."""
    return {"run_file.md": _run_file(), "other_files.md": _other_files()}


def _run_file() -> str:
    return "\n".join([_RUN_FILE, *_sections(keys_of(schema_of("run")), heading="##")])


def _other_files() -> str:
    parts = [_OTHER_FILES]
    for file, title in _TITLES.items():
        parts += [f"## {title}\n", *_sections(keys_of(schema_of(file)), heading="###")]
    return "\n".join(parts)


def _sections(keys: Sequence[Key], *, heading: str) -> Iterator[str]:
    """Yields a heading and a table for each section; nested sections have a heading of a lower level."""
    for key in keys:
        if key.is_section:
            yield f"{heading}{'#' if '.' in key.place else ''} `{key.inside}`\n"
            yield f"{_code_safe(key.meaning)} {_state(key)}\n"
            if key.variants:
                yield _table(["kind", "what it is"], [[f"`{kind.name}`", kind.about] for kind in key.variants])
            yield _keys_table(keys_below(keys, key))


def _state(key: Key) -> str:
    kinds = f"Of {', '.join(f'`{kind}`' for kind in key.kinds)}. " if key.kinds else ""
    return f"{kinds}Required." if key.default is None else f"{kinds}Default: `{key.default}`."


def _keys_table(keys: Sequence[Key]) -> str:
    has_kinds = any(key.kinds for key in keys)
    names = ["key", *(["of"] if has_kinds else []), "type", "unit", "default", "meaning"]
    rows = [
        [
            f"`{key.name}`",
            *([", ".join(f"`{kind}`" for kind in key.kinds)] if has_kinds else []),
            type_and_limits(key),
            key.unit or "",
            f"`{key.default}`" if key.default else REQUIRED,
            key.meaning,
        ]
        for key in keys
    ]
    return _table(names, rows)


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [names, ["---"] * len(names), *([_code_safe(cell) for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _code_safe(text: str) -> str:
    """Returns the text with Markdown's special characters escaped."""
    return text.replace("|", "\\|").replace("<", "&lt;")
