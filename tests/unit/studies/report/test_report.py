"""The tables and the figure."""

import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from run_records import DATA
from written_runs import write_run

from evenpack.console import Report
from evenpack.errors import ConfigError
from evenpack.studies.report import make_report

PNG = b"\x89PNG\r\n"


def made(folder: Path, *runs: Path) -> Report:
    return make_report(runs, folder)


@pytest.mark.slow
def test_a_report_of_two_runs_is_tables_and_a_figure_with_a_line_of_each(tmp_path: Path, drawn: list[Figure]) -> None:
    one = write_run(tmp_path / "one", config={"optimizer": {"kind": "adamw"}})
    two = write_run(tmp_path / "two", config={"optimizer": {"kind": "lamb"}}, loss=3.0)
    found = made(tmp_path / "new" / "report", one, two).value
    assert [path.name for path in (tmp_path / "new" / "report").iterdir()] == ["report.png"]
    assert {row["commit"] for row in found["runs"]} == {"abc123"}
    assert [row["training loss at the end"] for row in found["runs"]] == ["5.0000", "3.0000"]
    assert found["runs"][0]["padding share of all steps"] == "20.00 %"
    assert found["settings"] == {"optimizer.kind": ("adamw", "lamb")}
    (figure,) = drawn
    assert len(figure.axes) == 5, "loss against steps, tokens and time, validation, throughput"
    for axes in figure.axes:
        assert [line.get_label() for line in axes.get_lines() if line.get_label()[0] != "_"] == ["one", "two"]
    assert set(figure.axes[1].get_lines()[3].get_ydata()) == {3.0}
    assert figure.axes[3].get_lines()[0].get_xdata().tolist() == [500, 1000, 1500, 2000]


def test_unlike_short_and_unvalidated_runs_are_drawn_as_far_as_they_go(tmp_path: Path, drawn: list[Figure]) -> None:
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
