"""docs/quickstart.md, from beginning to end, as a reader would type it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from repository import ROOT
from small_run import COMMAND, metrics, process, write_corpus


def blocks(language: str) -> list[str]:
    text = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.mark.slow
def test_a_newcomer_gets_from_text_to_an_exported_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    write_corpus(tmp_path / "texts" / "documents.jsonl", documents=2000, first=0)
    commands = [line.split() for block in blocks("bash") for line in block.splitlines()]
    assert [words[1] for words in commands] == [
        "new",
        "prepare",
        "inspect",
        "budget",
        "train",
        "evaluate",
        "export",
        "report",
    ]
    for program, *words in commands:
        assert program == "evenpack"
        process([*COMMAND, *words])
    losses = [record["loss"] for record in metrics(tmp_path / "runs" / "my_run")]
    assert len(losses) == 60
    assert losses[-1] < losses[0] - 1
    model = transformers.AutoModelForCausalLM.from_pretrained("exported")
    tokenizer = transformers.AutoTokenizer.from_pretrained("exported")
    assert model(**tokenizer("pack0 sequence1", return_tensors="pt")).logits.shape[-1] == model.config.vocab_size
    assert "<html" in (tmp_path / "report" / "report.html").read_text().lower()
    (loop,) = blocks("python")
    done = subprocess.run([sys.executable, "-c", loop], check=True, capture_output=True, text=True)
    assert len(done.stdout.splitlines()) >= 2
    assert json.loads((tmp_path / "runs" / "my_run" / "summary.json").read_text())
