"""docs/errors.md shows what wrong inputs are told today, which always ends with exit code 2 and leaves no file."""

import runpy

from repository import ROOT


def test_the_page_of_messages_is_up_to_date() -> None:
    page = runpy.run_path(str(ROOT / "scripts/write_error_page.py"))["page"]()
    assert page == (ROOT / "docs/errors.md").read_text("utf-8"), "run `python scripts/write_error_page.py`"
