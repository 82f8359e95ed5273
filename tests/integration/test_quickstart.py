"""docs/quickstart.md, from beginning to end, as a reader would type it."""

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from repository import ROOT
from small_run import COMMAND, document, metrics, process


def blocks(language: str) -> list[str]:
    text = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def write_book(path: Path, *, first: int) -> None:
    """Writes a thousand paragraphs as plain text of short lines."""
    paragraphs = (textwrap.fill(document(number), 72) for number in range(first, first + 1000))
    path.write_text("\n\n".join(paragraphs) + "\n", encoding="utf-8")


@pytest.mark.slow
def test_a_newcomer_gets_from_text_to_an_exported_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    for number in range(2):
        write_book(tmp_path / "texts" / f"book_{number}.txt", first=1000 * number)
    commands = [line.split() for block in blocks("bash") for line in block.splitlines()]
    assert [words[1] for words in commands] == ["new", "prepare", "plan", "train", "evaluate", "export", "report"]
    said = {}
    for program, *words in commands:
        assert program == "evenpack"
        done = process([*COMMAND, *words])
        said[words[0]] = done.stdout + done.stderr
    assert "2 files = 2,000 documents" in said["new"]
    assert "warning" not in said["prepare"]
    assert re.search(r"^step 60  validation loss, texts \d+\.\d{4}$", said["train"], re.MULTILINE)
    losses = [record["loss"] for record in metrics(tmp_path / "runs" / "my_run")]
    assert len(losses) == 60
    assert losses[-1] < losses[0] - 1
    assert (tmp_path / "report" / "report.png").read_bytes().startswith(b"\x89PNG")
    words, loop = (
        subprocess.run([sys.executable, "-c", block], check=True, capture_output=True, text=True).stdout
        for block in blocks("python")
    )
    before, prompt, written = words.partition("The next morning")
    assert (before.strip(), prompt != "") == ("", True)
    assert written.strip()
    assert len(loop.splitlines()) >= 2
    assert json.loads((tmp_path / "runs" / "my_run" / "summary.json").read_text())
