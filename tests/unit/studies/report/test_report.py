"""The tables and the figure."""

import sys
from pathlib import Path

import pytest
from drawn_figures import keep_figures, texts_of
from written_runs import DATA, write_run

from evenpack.console import Report
from evenpack.errors import ConfigError
from evenpack.studies import report
from evenpack.studies.report import make_report

PNG = b"\x89PNG\r\n"


def made(folder: Path, *runs: Path) -> Report:
    return make_report(runs, folder)


def test_a_report_of_two_runs_is_a_figure_and_tables(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", config={"optimizer": {"kind": "adamw"}})
    two = write_run(tmp_path / "two", config={"optimizer": {"kind": "lamb"}})
    found = made(tmp_path / "new" / "report", one, two).value
    assert [path.name for path in (tmp_path / "new" / "report").iterdir()] == ["report.png"]
    assert {row["commit"] for row in found["runs"]} == {"abc123"}
    assert [row["training loss at the end"] for row in found["runs"]] == ["5.0000", "5.0000"]
    assert found["runs"][0]["padding share of all steps"] == "20.00 %"
    assert found["settings"] == {"optimizer.kind": ("adamw", "lamb")}


@pytest.mark.slow
def test_each_panel_has_a_line_of_each_run_and_the_legend_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = keep_figures(monkeypatch, report)
    made(tmp_path / "report", write_run(tmp_path / "one"), write_run(tmp_path / "two", loss=3.0))
    (figure,) = drawn
    loss = "Training loss against"
    titles = [f"{loss} steps", f"{loss} tokens", f"{loss} time", "Validation on wiki", "Throughput"]
    assert [axes.get_title(loc="left") for axes in figure.axes] == titles
    for axes in figure.axes:
        assert [line.get_label() for line in axes.get_lines() if line.get_label()[0] != "_"] == ["one", "two"]
    assert set(figure.axes[1].get_lines()[3].get_ydata()) == {3.0}
    assert figure.axes[3].get_lines()[0].get_xdata().tolist() == [500, 1000, 1500, 2000]
    assert texts_of(figure).startswith("one two one: data wiki")


def test_unlike_short_and_unvalidated_runs_are_drawn_as_far_as_they_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = keep_figures(monkeypatch, report)
    other = write_run(tmp_path / "other", steps=1, data=DATA.model_copy(update={"fingerprint": "x"}), validation=None)
    empty = write_run(tmp_path / "empty", steps=0)
    skipped = write_run(tmp_path / "skipped", steps=3, loss=None, tokens_per_second=None, slots=0, validation=None)
    found = made(tmp_path / "report", other, empty, skipped).value
    titles = [axes.get_title(loc="left") for axes in drawn[0].axes]
    assert titles == ["Training loss against tokens", "Training loss against time", "Throughput"]
    assert found["figure"].read_bytes().startswith(PNG)
    assert "The runs had other data: other documents, recipe, packing or mixture." in found["notes"]
    assert "empty has no step yet and is not drawn." in found["notes"]


def test_without_matplotlib_or_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "one")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file, where --output would write, is not a folder"):
        made(tmp_path / "file", run)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"evenpack\[plots\]"):
        made(tmp_path / "report", run)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "one"]
