"""What a person at the command line sees."""

import io
import json
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

from evenpack.data.prepare.progress import PrepareState, Progress
from evenpack.launcher import console
from evenpack.launcher.console import PrepareProgress, WideTable, pairs, print_error, print_json, table


@dataclass(frozen=True)
class Finding:
    path: Path
    values: tuple[float, ...]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def state(bytes_read: int, *, source: str = "wiki") -> PrepareState:
    return PrepareState(
        stage="tokens",
        source=source,
        documents=bytes_read // 1000,
        tokens=bytes_read // 4,
        bytes_read=bytes_read,
        bytes_resumed=0,
        total_bytes=4_000_000,
        elapsed_seconds=2.0,
    )


def rendered(shown: object, *, width: int = 100) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width).print(shown)
    return stream.getvalue()


def test_json_is_one_document_that_any_parser_reads(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"found": Finding(path=Path("a/b"), values=(1.5, math.nan, math.inf)), 3: [True, None]})
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"found": {"path": "a/b", "values": [1.5, None, None]}, "3": [True, None]}
    assert captured.err == ""


def test_errors_go_to_standard_error_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    print_error("no [bold] markup in\n  'data.sources[0]' " + "x" * 300)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "error: no [bold] markup in\n  'data.sources[0]' " + "x" * 300 + "\n"


def test_tables_show_numbers_with_thousands_and_what_is_missing_as_a_dash() -> None:
    text = rendered(table([{"source": "wiki", "tokens": 1234567, "loss": None, "ok": True}]))
    assert [line.split() for line in text.splitlines()] == [
        ["source", "tokens", "loss", "ok"],
        ["wiki", "1,234,567", "-", "yes"],
    ]
    assert "learning rate  0.0001235" in rendered(pairs({"learning rate": 0.000123456}))
    assert rendered(table([])).strip() == ""


def test_progress_is_a_line_every_few_seconds_where_there_is_no_terminal() -> None:
    stream, clock = io.StringIO(), Clock()
    with PrepareProgress(Console(file=stream, width=160), clock=clock) as progress:
        for seconds in range(12):
            clock.now = float(seconds)
            progress.update(state(100_000 * seconds))
        progress.update(state(4_000_000))
        progress.note("done with [wiki]")
    lines = stream.getvalue().splitlines()
    assert [line.split("  ")[1] for line in lines[:-1]] == ["0 %", "12 %", "25 %", "100 %"]
    assert lines[1] == "wiki: tokenising  12 %  500 documents  125k tokens  0.2 MB/s  14s to go"
    assert lines[-1] == "done with [wiki]"


def test_progress_is_a_bar_for_each_source_on_a_terminal() -> None:
    stream = io.StringIO()
    with PrepareProgress(Console(file=stream, width=100, force_terminal=True)) as progress:
        progress.update(state(1_000_000))
        progress.update(state(4_000_000))
        progress.update(state(2_000_000, source="code"))
    last = stream.getvalue()
    assert "wiki: tokenising" in last
    assert "code: tokenising" in last
    assert "100 %" in last


def test_progress_is_what_prepare_takes() -> None:
    assert isinstance(PrepareProgress(console.messages()), Progress)


@pytest.mark.parametrize(
    ("width", "parts"),
    [(80, [[1, 2, 4, 8]]), (35, [[1, 2, 4], [8]]), (34, [[1, 2], [4, 8]]), (20, [[1], [2], [4], [8]])],
)
def test_a_table_too_wide_goes_on_below_and_breaks_no_number(width: int, parts: list[list[int]]) -> None:
    """A name's 6 letters and a number's 7 digits, each with a gap of 2 behind: 8, and 9 for every column."""
    names = ("packed", "padded")
    rows = [{"": name, **{str(count): f"{count + 0.12345:.5f}" for count in (1, 2, 4, 8)}} for name in names]
    stream = io.StringIO()
    Console(file=stream, width=width).print(WideTable(rows=rows, title="Rates"))
    blocks = [[line.split() for line in block.splitlines()] for block in stream.getvalue().rstrip().split("\n\n")]
    assert len(blocks) == len(parts)
    for block, counts in zip(blocks, parts, strict=True):
        assert block[-3:] == [
            [str(count) for count in counts],
            *([name, *(f"{count + 0.12345:.5f}" for count in counts)] for name in names),
        ]
    assert [block[0][0] for block in blocks] == ["Rates"] * len(blocks)
    assert ["(further" in block[0] for block in blocks] == [False] + [True] * (len(blocks) - 1)
