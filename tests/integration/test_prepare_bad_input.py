"""`evenpack prepare` on wrong input: exit code 2, the mistake and its place, and no half-written files."""

import json
from pathlib import Path

import pytest
from prepared_files import contents
from small_run import evenpack, write_run


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    return write_run(tmp_path)


def refusal(run_file: Path, *overrides: str) -> str:
    """Returns the standard error of a `prepare` that is refused and leaves no data behind."""
    done = evenpack("prepare", run_file, *overrides, expected=2)
    assert "Traceback" not in done.stderr
    assert not (run_file.parent / "data").exists()
    return " ".join(done.stderr.split())


def test_a_missing_file_is_named_with_the_override(run_file: Path) -> None:
    message = refusal(run_file, "data.sources.two.path=nowhere.jsonl")
    assert "source 'two': nowhere.jsonl does not exist" in message
    assert "give data.sources.two.path=FILE" in message


def test_an_unreadable_line_in_the_last_source_is_named(run_file: Path) -> None:
    with (run_file.parent / "two.jsonl").open("a") as file:
        file.write("{broken\n")
    assert "two.jsonl, line 91: not a readable JSON line" in refusal(run_file)


def test_a_wrong_text_key_lists_the_keys_there_are(run_file: Path) -> None:
    assert "no key 'body'; existing keys: 'text'" in refusal(run_file, "data.sources.one.text_key=body")


def test_invalid_utf8_is_named_by_byte(run_file: Path) -> None:
    with (run_file.parent / "one.jsonl").open("ab") as file:
        file.write(b'{"text": "\xc3\x28"}\n')
    assert "one.jsonl, line 241: invalid UTF-8: byte 0xc3" in refusal(run_file)


def test_a_tokenizer_with_a_wrong_vocabulary_is_refused(run_file: Path) -> None:
    folder = run_file.parent / "tokenizer"
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps({}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    section = f"data.tokenizer={{kind: gpt2, path: {folder}}}"
    assert "vocab.json is not a GPT-2 vocabulary" in refusal(run_file, section)


def test_prepare_says_nothing_more_to_do_and_refuses_a_changed_section(run_file: Path) -> None:
    evenpack("prepare", run_file)
    before = contents(run_file.parent / "data")
    assert "is prepared already, and every file is as it was written" in evenpack("prepare", run_file).stderr
    done = evenpack("prepare", run_file, "data.pack_length=96", expected=2)
    assert "data.pack_length: prepared with 64, this run has 96" in done.stderr
    assert contents(run_file.parent / "data") == before
