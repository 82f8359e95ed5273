"""Rows that are cut and filtered before tokenising: the stored rows, and their accounting after any interruption."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from prepared_files import (
    Recorder,
    ShownState,
    StoppedError,
    contents,
    data_config,
    interrupt,
    recorded,
    save_tokenizer,
    sentences,
    write_jsonl,
)
from pydantic import ValidationError

from evenpack.data.config import DataConfig
from evenpack.data.manifest import Manifest, SourceRecord
from evenpack.data.prepare.prepare import prepare
from evenpack.data.sources.rows import RowAccounting
from evenpack.errors import DataError

MINIMUM_WORDS = 30


@pytest.fixture(scope="module")
def articles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns articles of up to eight lines, some of them blank, the last ones with short lines only."""
    folder = tmp_path_factory.mktemp("articles")
    texts = ["\n \n".join(sentences(n % 9, seed=n)) for n in range(120)]
    write_jsonl(folder / "articles.jsonl", [*texts, *["a short line\nanother"] * 30])
    kept = [line for text in texts for line in text.split("\n") if len(line.split()) >= MINIMUM_WORDS]
    write_jsonl(folder / "kept.jsonl", kept)
    return folder


def by_rows(articles: Path, **changes: Any) -> DataConfig:
    path = articles / "articles.jsonl"
    return data_config(
        {"wiki": {"kind": "jsonl", "path": path, "rows": "lines", "minimum_words": MINIMUM_WORDS}}, **changes
    )


@pytest.fixture(scope="module")
def whole(articles: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepares without interruption; tests must not change the result."""
    directory = tmp_path_factory.mktemp("whole") / "data"
    prepare(by_rows(articles), directory)
    return directory


def test_what_is_stored_is_what_a_source_of_the_kept_rows_would_give(
    articles: Path, whole: Path, tmp_path: Path
) -> None:
    prepare(data_config({"wiki": {"kind": "jsonl", "path": articles / "kept.jsonl"}}), tmp_path / "kept")
    found, expected = (
        {name: content for name, content in contents(directory).items() if not name.endswith(".json")}
        for directory in (whole, tmp_path / "kept")
    )
    assert found == expected, "tokens, hashes, splits and packs"
    tokenizers = [(directory / "tokenizer" / "tokenizer.json").read_bytes() for directory in (whole, tmp_path / "kept")]
    assert tokenizers[0] == tokenizers[1], "trained on the kept rows alone"


def test_the_manifest_accounts_for_rows_and_words(articles: Path, whole: Path) -> None:
    record = Manifest.read(whole).sources["wiki"]
    lines = [line for n in range(120) for line in sentences(n % 9, seed=n)] + ["a short line", "another"] * 30
    words = [len(line.split()) for line in lines]
    kept = [count for count in words if count >= MINIMUM_WORDS]
    assert record.rows == RowAccounting(
        rows_read=len(lines),
        rows_kept=len(kept),
        rows_dropped=len(lines) - len(kept),
        words_read=sum(words),
        words_kept=sum(kept),
        words_dropped=sum(words) - sum(kept),
    )
    assert record.documents == len(kept)
    (row,) = Manifest.read(whole).row_summary()
    assert row["rows_dropped_share"] == pytest.approx(1 - len(kept) / len(lines))
    assert row["words_dropped_share"] == pytest.approx(1 - sum(kept) / sum(words))


@pytest.mark.parametrize("reports", [1, 11])
def test_an_interrupted_call_is_gone_on_with_byte_for_byte(
    articles: Path, whole: Path, tmp_path: Path, small_batches: None, reports: int
) -> None:
    interrupt(by_rows(articles), tmp_path / "data", reports)
    recorder = recorded(by_rows(articles), tmp_path / "data")
    assert {state.stage for state in recorder.states} == {"tokens"}, "the tokenizer is not trained again"
    assert recorder.states[0].bytes_resumed > 0
    assert recorder.states[-1].bytes_read == recorder.states[-1].total_bytes
    assert contents(tmp_path / "data") == contents(whole)


def test_a_call_that_ended_behind_the_last_row_is_gone_on_with(
    articles: Path, whole: Path, tmp_path: Path, small_batches: None
) -> None:
    documents = Manifest.read(whole).sources["wiki"].documents

    class StopBehindTheLast(Recorder):
        def update(self, state: ShownState) -> None:
            if (state.stage, state.documents) == ("tokens", documents):
                raise StoppedError

    with pytest.raises(StoppedError):
        prepare(by_rows(articles), tmp_path / "data", progress=StopBehindTheLast())
    prepare(by_rows(articles), tmp_path / "data")
    assert contents(tmp_path / "data") == contents(whole)


def test_the_accounting_stays_where_the_token_file_was_complete(
    articles: Path, whole: Path, tmp_path: Path, small_batches: None
) -> None:
    strict = {"kind": "documents", "max_sequence_length": 64, "long_documents": "error"}
    with pytest.raises(DataError, match=r"recipe\.long_documents is 'error'"):
        prepare(by_rows(articles, recipe=strict), tmp_path / "data")
    recorder = recorded(by_rows(articles), tmp_path / "data")
    assert [state.bytes_resumed for state in recorder.states] == [recorder.states[0].total_bytes], "no row read again"
    assert contents(tmp_path / "data") == contents(whole)


@pytest.mark.parametrize("tokenizer", ["trained", "loaded"])
def test_a_filter_that_keeps_nothing_leaves_nothing(articles: Path, tmp_path: Path, tokenizer: str) -> None:
    config = data_config(
        {"wiki": {"kind": "jsonl", "path": articles / "articles.jsonl", "minimum_words": 10_000}},
        tokenizer={"kind": "train"} if tokenizer == "trained" else save_tokenizer(tmp_path / "tokenizer"),
    )
    with pytest.raises(DataError, match=r"source 'wiki' keeps no row: .*minimum_words is 10000, and"):
        prepare(config, tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_an_accounting_that_does_not_fit_the_documents_is_refused(whole: Path) -> None:
    record = Manifest.read(whole).sources["wiki"]
    assert record.rows is not None
    lost = {**asdict(record.rows), "rows_kept": record.rows.rows_kept - 1, "rows_dropped": record.rows.rows_dropped + 1}
    with pytest.raises(ValidationError, match=r"has \d+ documents, of \d+ rows kept"):
        SourceRecord.model_validate({**record.model_dump(), "rows": lost})
