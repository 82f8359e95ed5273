"""Writes docs/run_file.md and docs/other_files.md from the schemas: `python scripts/write_run_file_pages.py`."""

from pathlib import Path

from evenpack.launcher.key_reference import pages

DOCS = Path(__file__).parents[1] / "docs"

for name, text in pages().items():
    (DOCS / name).write_text(text, encoding="utf-8")
