"""Whatever is in a file of JSON, and wherever it is read: an error that names it, never a traceback."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from evenpack.data.manifest import Manifest
from evenpack.data.recipes import DocumentsRecipe
from evenpack.data.sequences import TokenAccounting, open_view
from evenpack.data.sequences.view import write_description
from evenpack.data.tokenizers.byte_pairs import read_byte_pairs
from evenpack.data.tokenizers.tokenizer import Tokenizer
from evenpack.data.tokens.file import TokenFile
from evenpack.data.tokens.writer import read_journal
from evenpack.engine.checkpoints.files import read_manifest
from evenpack.engine.reporting.run_record import read_run_record
from evenpack.engine.resolving.cost_model import CostModel
from evenpack.errors import DataError, EvenpackError
from evenpack.files import parse_json_object
from evenpack.finetuning.squad import read_questions
from evenpack.studies.chunking.curves import read_curve
from evenpack.studies.lengths.reading import from_json

CONTENTS = (b"", b"[1, 2]", b'{"a": 1', b'{"a": {"b": [1e999, null]}}', b'{"a": "\xff\xfe"}')
"""Nothing, no object, half an object, another object, and no text."""

RECIPE = DocumentsRecipe(kind="documents", max_sequence_length=64)

READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "a prepared set": ("manifest.json", lambda file: Manifest.read(file.parent)),
    "a journal": ("tokens.journal.json", lambda file: read_journal(file.parent / "tokens")),
    "a view": ("view.json", lambda file: open_view(file.parent, TokenFile.__new__(TokenFile), RECIPE)),
    "a checkpoint": ("manifest.json", lambda file: read_manifest(file.parent)),
    "a cost model": ("cost.json", CostModel.read),
    "a run's record": ("run.json", lambda file: read_run_record(file.parent)),
    "a tokenizer": ("tokenizer_config.json", lambda file: Tokenizer.load(file.parent)),
    "GPT-2's vocabulary": ("vocab.json", lambda file: read_byte_pairs(file.parent)),
    "questions": ("train.json", read_questions),
    "a learning curve": ("curve.json", lambda file: read_curve(file.parent)),
    "a histogram": ("lengths.json", lambda file: from_json(file, None)),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_file_that_holds_something_else_is_refused(tmp_path: Path, reader: str) -> None:
    name, read = READERS[reader]
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    for content in CONTENTS:
        if (reader, content) == ("a histogram", b"[1, 2]"):
            continue  # that is one
        (tmp_path / name).write_bytes(content)
        try:
            found = read(tmp_path / name)
        except EvenpackError:
            continue
        pytest.fail(f"{content!r} was read as {found}")


@pytest.mark.parametrize(("written", "damaged"), [
    ('"recipe"', '"recipd"'), ('"token_file_tokens"', '"token_file_tokenr"'), ('"accounting"', '"accountinf"'),
    ('"max_segments_per_sequence"', '"max_segments_per_sequencd"'), ('"tokens_kept"', '"tokens_keps"'),
    ('"tokens_kept": 3', '"tokens_kept": 2'),
])  # fmt: skip
def test_a_view_with_a_damaged_key_or_number_is_refused(tmp_path: Path, written: str, damaged: str) -> None:
    token_file = Mock(spec=TokenFile, tokens=3)
    write_description(tmp_path, RECIPE, token_file, TokenAccounting.of_whole(sequences=1, tokens=3))
    content = (tmp_path / "view.json").read_text()
    assert content.count(written) == 1
    (tmp_path / "view.json").write_text(content.replace(written, damaged))
    with pytest.raises(DataError, match=r"view\.json is missing or damaged"):
        open_view(tmp_path, token_file, RECIPE)


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary() | st.recursive(st.text() | st.integers(), st.lists).map(lambda value: json.dumps(value).encode()))
@example(b"[" * 20_000)
@example(b'{"a":' * 20_000)
@example(b"\0" * 100)
def test_whatever_is_no_object_is_an_error_of_its_value(content: bytes) -> None:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        with pytest.raises(ValueError):  # noqa: PT011 - the messages are those of json
            parse_json_object(content)


@pytest.mark.parametrize("reader", ["a prepared set", "a journal", "a checkpoint", "a cost model", "a view"])
def test_a_file_that_cannot_be_read_says_so_and_not_that_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str
) -> None:
    def refuse(_: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    name, read = READERS[reader]
    (tmp_path / name).write_text("{}")
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(EvenpackError, match="Permission denied") as caught:
        read(tmp_path / name)
    assert "free" not in str(caught.value).lower()
