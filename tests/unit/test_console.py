"""Output of the command line for people."""

import io
import json
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

from evenpack import console
from evenpack.console import pairs, print_error, print_json, table


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


def test_a_log_file_is_no_terminal_whatever_the_environment_asks_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert not console.messages().is_terminal
    print_error("plain")
    assert capsys.readouterr().err == "error: plain\n"
