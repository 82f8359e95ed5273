"""Output of the command line for people."""

import io
import json
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

from evenpack import console
from evenpack.console import WideTable, pairs, print_error, print_json, table


@dataclass(frozen=True)
class Finding:
    path: Path
    values: tuple[float, ...]


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


@pytest.mark.parametrize(
    ("width", "parts"),
    [(80, [[1, 2, 4, 8]]), (35, [[1, 2, 4], [8]]), (34, [[1, 2], [4, 8]]), (20, [[1], [2], [4], [8]])],
)
def test_a_table_too_wide_continues_below_and_breaks_no_number(width: int, parts: list[list[int]]) -> None:
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


def test_a_log_file_is_no_terminal_whatever_the_environment_asks_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert not console.messages().is_terminal
    print_error("plain")
    assert capsys.readouterr().err == "error: plain\n"
