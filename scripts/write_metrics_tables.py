"""Writes the tables at the end of docs/metrics.md from the definitions: `python scripts/write_metrics_tables.py`."""

from pathlib import Path
from typing import get_args

from evenpack.engine.reporting.definitions import DEFINITIONS, Group
from evenpack.files import write_text

FIRST_HEADING = "### Progress"

_TABLE_HEAD = "| name | unit | over ranks | meaning | in |\n| --- | --- | --- | --- | --- |"


def metrics_tables() -> str:
    """Returns the definitions as Markdown, with a table for each group."""
    parts = []
    for group in get_args(Group):
        rows = [metric for metric in DEFINITIONS if metric.group == group]
        lines = [f"### {group.capitalize()}", "", _TABLE_HEAD]
        lines += [
            f"| `{row.name}` | {row.unit} | {row.over_ranks or '-'} | {row.meaning} | {row.when} |" for row in rows
        ]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    page = Path(__file__).parents[1] / "docs" / "metrics.md"
    prose, heading, _ = page.read_text(encoding="utf-8").partition(FIRST_HEADING)
    if not heading:
        raise SystemExit(f"{page} has no heading '{FIRST_HEADING}', where the tables begin: restore it")
    write_text(page, prose + metrics_tables())
