"""Writes docs/run_file.md and docs/other_files.md from the schemas: `python scripts/write_run_file_pages.py`."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from evenpack.launcher.key_reference import REQUIRED, Key, keys_below, keys_of, schema_of, type_and_limits

DOCS = Path(__file__).parents[1] / "docs"

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


if __name__ == "__main__":
    for name, text in pages().items():
        (DOCS / name).write_text(text, encoding="utf-8")
