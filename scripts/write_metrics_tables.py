"""Writes the tables at the end of docs/metrics.md from the definitions: `python scripts/write_metrics_tables.py`."""

from pathlib import Path

from evenpack.engine.reporting.definitions import metrics_tables
from evenpack.files import write_text

FIRST_HEADING = "### Progress"

page = Path(__file__).parents[1] / "docs" / "metrics.md"
prose, heading, _ = page.read_text(encoding="utf-8").partition(FIRST_HEADING)
if not heading:
    raise SystemExit(f"{page} has no heading '{FIRST_HEADING}', where the tables begin: restore it")
write_text(page, prose + metrics_tables())
