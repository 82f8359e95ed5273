"""The page and the figures."""

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from drawn_figures import keep_figures
from written_runs import DATA, write_run

from evenpack.console import Report
from evenpack.engine.reporting.definitions import WAIT_CAUSES
from evenpack.errors import ConfigError
from evenpack.studies.report import report
from evenpack.studies.report.report import make_report

PNG = b"\x89PNG\r\n"


class Page(HTMLParser):
    """Collects the elements of a page, and the text of its cells and notes."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, f"{name}={value}") for name, value in attrs]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())


def made(folder: Path, *runs: Path) -> Report:
    return make_report(runs, folder, is_held=lambda output_dir: False)


def test_a_report_of_two_runs_is_a_page_by_itself_and_a_png_for_each_figure(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", planned=20, config={"optimizer": {"kind": "<adamw>"}})
    two = write_run(tmp_path / "two", planned=30, config={"optimizer": {"kind": "lamb"}})
    report = made(tmp_path / "new" / "report", one, two)
    names = ["loss", "padding", "throughput", "validation", "waits"]
    assert sorted(path.name for path in (tmp_path / "new" / "report").iterdir()) == sorted(
        [*(f"{name}.png" for name in names), "report.html"]
    )
    page = Page(report.value["page"])
    assert page.open == [], "each element is closed"
    pictures = [value for tag, value in page.attributes if tag == "img" and value.startswith("src=")]
    assert len(pictures) == len(names)
    assert all(picture.startswith("src=data:image/png;base64,") for picture in pictures)
    assert not re.search(r"https?://|<script|<link", report.value["page"].read_text()), "nothing is fetched"
    assert {"<adamw>", "lamb", "optimizer.kind", "finished", "stopped", "abc123"} <= set(page.texts)
    assert [row["training loss at the end"] for row in report.value["runs"]] == ["5.0000", "5.0000"]
    assert report.value["runs"][0]["padding share of all steps"] == "20.00 %"
    assert report.value["settings"] == {"optimizer.kind": ("<adamw>", "lamb")}


def test_unlike_short_and_unvalidated_runs_are_drawn_as_far_as_they_go(tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", steps=1, data=DATA.model_copy(update={"fingerprint": "x"}), validation=None)
    empty = write_run(tmp_path / "empty", steps=0)
    skipped = write_run(tmp_path / "skipped", steps=3, loss=None, tokens_per_second=None, slots=0, validation=None)
    report = made(tmp_path / "report", other, empty, skipped)
    assert "validation" not in report.value["figures"]
    assert all(path.read_bytes().startswith(PNG) for path in report.value["figures"].values())
    texts = Page(report.value["page"]).texts
    assert "The runs had other data: other documents, recipe, packing or mixture." in texts
    assert "empty has no step yet and is not drawn." in texts


def test_the_page_has_the_pauses_of_saves_and_their_share_of_the_time(tmp_path: Path) -> None:
    run = write_run(tmp_path / "one", steps=20, checkpoint={"step": 1, "pause_seconds": 0.5})
    report = made(tmp_path / "report", run, write_run(tmp_path / "two"))
    texts = Page(report.value["page"]).texts
    assert "10.00 s in 20 saves (20.00 % of the time)" in texts
    assert "0.00 s in 0 saves" in texts


def test_the_last_save_after_which_there_was_no_step_is_counted_from_the_summary(tmp_path: Path) -> None:
    run = write_run(tmp_path / "one", planned=20)
    path = run / "summary.json"
    totals = {"saved": 1, "failed": 0, "bytes": 9, "pause_seconds": 2.0, "pause_share": 0.04}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"checkpoints": totals}))
    assert "2.00 s in 1 save (4.00 % of the time)" in Page(made(tmp_path / "report", run).value["page"]).texts


def test_without_matplotlib_or_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "one")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file, where --output would write, is not a folder"):
        made(tmp_path / "file", run)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"evenpack\[plots\]"):
        made(tmp_path / "report", run)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "one"]


def test_waits_by_cause_are_shown_where_a_run_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = keep_figures(monkeypatch, report)
    split = {f"wait_{cause}_seconds": 0.02 * number for number, cause in enumerate(WAIT_CAUSES, 1)}
    one = write_run(tmp_path / "one", world_size=2, **split)
    other = write_run(tmp_path / "other")
    row, none = made(tmp_path / "both", one, other).value["runs"]
    name = "waiting by plan / machine / noise / loader"
    assert (row[name], none[name]) == ("1.00 % / 2.00 % / 3.00 % / 4.00 %", "-")
    made(tmp_path / "alone", one)
    (panels,) = [
        figure.axes for figure in drawn if len(figure.axes) == 3 and "loss" not in str(figure.axes[0].get_ylabel())
    ]
    assert panels[2].get_title(loc="left") == "Waiting by cause"
    assert name not in made(tmp_path / "without", other).value["runs"][0]
