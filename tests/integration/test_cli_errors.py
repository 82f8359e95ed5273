"""Bad input, as users have it: a message that says what is wrong, exit code 2, nothing half-written."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import yaml

from evenpack.launcher import cli, launch


@dataclass(frozen=True)
class Refused:
    """What a refused command has printed."""

    message: str


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that must end with exit code 2, nothing on standard output and no traceback; the message."""
    monkeypatch.setattr(launch, "cuda_devices", lambda: 0)

    def run(*arguments: str | Path) -> str:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["evenpack", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        captured = capsys.readouterr()
        assert exit_.value.code == 2, captured.err
        assert captured.out == ""
        assert "error: " in captured.err
        assert "Traceback" not in captured.err
        return captured.err.partition("error: ")[2]

    return run


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of two good documents a line of text.jsonl; the current folder."""
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"text": f"some words of document {number} " * (1 + number % 5)}) for number in range(120)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines) + "\n")
    write_run(tmp_path)
    return tmp_path


def write_run(folder: Path, **changes: object) -> None:
    """run.yaml; `changes` replace keys of its data section."""
    data = {
        "sources": {"wiki": {"kind": "jsonl", "path": "text.jsonl"}},
        "validation_fraction": 0.1,
        "tokenizer": {"kind": "train", "vocabulary_size": 300},
        "recipe": {"kind": "documents", "max_sequence_length": 32},
        "pack_length": 32,
    }
    values = {
        "run": {"name": "bad", "output_dir": "out"},
        "data": data | changes,
        "model": {"kind": "gpt2", "preset": "tiny", "hidden_size": 32},
        "training": {"packs_per_step": 8, "packs_per_micro_batch": 2, "steps": 4, "precision": "fp32"},
        "optimizer": {"learning_rate": 1e-3},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(values))


def succeed(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["evenpack", *arguments])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert not exit_.value.code


def assert_nothing_prepared(folder: Path) -> None:
    """No manifest, no token file under its final name."""
    left = [path for path in (folder / "out").rglob("*") if path.is_file() and not path.name.startswith(".")]
    assert left == []


BAD_SOURCES = {
    "a missing file": (b"", ["data.sources.wiki.path=nothing.jsonl"], "nothing.jsonl"),
    "an unreadable line": (b'{"text": "a b c"}\n{"text": "a b\n', [], "bad.jsonl, line 2"),
    "a line that is no object": (b'{"text": "a b c"}\n[1, 2]\n', [], "bad.jsonl, line 2"),
    "a wrong text key": (b'{"body": "a b c", "id": 1}\n', [], "body, id"),
    "invalid UTF-8": (b'{"text": "a b c"}\n{"text": "\xff\xfe"}\n', [], "bad.jsonl, line 2"),
    "an empty corpus": (b"", [], "bad.jsonl"),
    "documents of nothing": (b'{"text": ""}\n', [], "wiki"),
}


@pytest.mark.parametrize("case", BAD_SOURCES)
def test_a_source_that_cannot_be_read_is_named_with_its_place(
    case: str, folder: Path, refuse: Callable[..., str]
) -> None:
    content, overrides, expected = BAD_SOURCES[case]
    (folder / "bad.jsonl").write_bytes(content)
    message = refuse("prepare", "run.yaml", "data.sources.wiki.path=bad.jsonl", *overrides)
    assert expected in message.replace("\n", " ")
    assert_nothing_prepared(folder)


BAD_SETTINGS = {
    "a key that does not exist": (["training.step=5"], "did you mean 'steps'"),
    "a source that does not exist": (["data.sources.wikki.path=x"], "did you mean 'wiki'"),
    "a section that does not exist": (["trainig.steps=5"], "did you mean 'training'"),
    "a value out of range": (["training.steps=0"], "training.steps: Input should be greater than or equal to 1, found 0"),
    "a value of the wrong kind": (["training.steps=many"], "training.steps"),
    "two values that contradict": (["data.recipe.max_sequence_length=64"], "above pack_length (32)"),
    "an override without a value": (["training.steps"], "not of the form section.key=value"),
    "an algorithm that does not exist": (["data.packing.algorithm=longest"], "longest_pack_first"),
}


@pytest.mark.parametrize("case", BAD_SETTINGS)
def test_a_setting_that_is_wrong_is_named_with_what_would_be_right(
    case: str, folder: Path, refuse: Callable[..., str]
) -> None:
    overrides, expected = BAD_SETTINGS[case]
    assert expected in refuse("prepare", "run.yaml", *overrides)
    assert not (folder / "out").exists()


BAD_TOKENIZERS = {
    "a folder that is not there": (None, "merges.txt"),
    "an empty vocabulary": (({}, "#version: 0.2\n"), "vocab"),
    "a vocabulary of another tokenizer": (({"[UNK]": 0, "hello": 1, "world": 2}, "#version: 0.2\n"), "vocab"),
    "a vocabulary that is no JSON": (("{", "#version: 0.2\n"), "vocab"),
}


@pytest.mark.parametrize("case", BAD_TOKENIZERS)
def test_a_tokenizer_that_cannot_be_right_is_refused(case: str, folder: Path, refuse: Callable[..., str]) -> None:
    files, expected = BAD_TOKENIZERS[case]
    if files is not None:
        (folder / "tokenizer").mkdir()
        vocabulary, merges = files
        text = vocabulary if isinstance(vocabulary, str) else json.dumps(vocabulary)
        (folder / "tokenizer" / "vocab.json").write_text(text)
        (folder / "tokenizer" / "merges.txt").write_text(merges)
    write_run(folder, tokenizer={"kind": "gpt2", "path": "tokenizer"})
    assert expected in refuse("prepare", "run.yaml")
    assert_nothing_prepared(folder)


def test_a_token_outside_of_the_vocabulary_is_refused(folder: Path, refuse: Callable[..., str]) -> None:
    from evenpack.data.token_file_writer import TokenFileWriter

    assert TokenFileWriter is not None
