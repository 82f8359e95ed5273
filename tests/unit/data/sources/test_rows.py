"""Rows of a source: how documents are cut, what is too short, and the accounting of rows and words."""

from pathlib import Path
from typing import Any

import pytest
import xxhash
from prepared_files import sentences, write_jsonl
from pydantic import TypeAdapter, ValidationError

from evenpack.data.sources.config import Source
from evenpack.data.sources.corpus import Corpus
from evenpack.data.sources.kinds import open_corpus
from evenpack.data.sources.rows import RowAccounting, RowCorpus
from evenpack.errors import DataError

SECTION: TypeAdapter[Source] = TypeAdapter(Source)
ARTICLES = [
    "A Title\n\nfirst line of three\nsecond  line of   five words \n \nlast line",
    "",
    " \n\n\t\n",
    "\r\nan end\r\nof two\r\n\r\nkinds\r\n",
    "one long line without an end",
]
LINES = [
    "A Title",
    "first line of three",
    "second  line of   five words ",
    "last line",
    "an end",
    "of two",
    "kinds",
    "one long line without an end",
]
PARAGRAPHS = [
    "A Title",
    "first line of three\nsecond  line of   five words ",
    "last line",
    "an end\nof two",
    "kinds",
    "one long line without an end",
]


def source(kind: str, **keys: Any) -> Source:
    return SECTION.validate_python({"kind": kind, **keys})


def corpus(folder: Path, texts: list[str], **keys: Any) -> Corpus:
    return open_corpus("wiki", source("jsonl", path=write_jsonl(folder / "a.jsonl", texts), **keys))


def rows(found: Corpus, start: int = 0) -> list[str]:
    return [document.text for document in found.documents(start)]


def accounting(found: Corpus) -> RowAccounting:
    """Returns the accounting after all rows were read."""
    assert isinstance(found, RowCorpus)
    list(found.documents())
    assert found.accounting is not None
    return found.accounting


def test_a_row_is_a_document_with_a_size_and_hash_of_its_own(tmp_path: Path) -> None:
    found = corpus(tmp_path, ["zwölf\nzehn", "zehn"], rows="lines")
    first, second, third = found.documents()
    assert (first.text_bytes, first.identity) == (6, xxhash.xxh3_64_intdigest("zwölf".encode()))
    assert second.identity == third.identity != first.identity
    assert first.bytes_read <= second.bytes_read <= third.bytes_read <= found.total_bytes


@pytest.mark.parametrize(("kind", "minimum", "expected"), [
    ("lines", None, LINES),
    ("paragraphs", None, PARAGRAPHS),
    (None, None, ARTICLES),
    ("lines", 1, LINES),
    ("lines", 4, ["first line of three", "second  line of   five words ", "one long line without an end"]),
    ("lines", 6, ["one long line without an end"]),
    ("paragraphs", 4, ["first line of three\nsecond  line of   five words ", "an end\nof two", PARAGRAPHS[-1]]),
    (None, 1, [ARTICLES[0], ARTICLES[3], ARTICLES[4]]),
])  # fmt: skip
def test_documents_are_cut_into_rows_and_those_that_are_blank_or_have_fewer_words_are_dropped(
    tmp_path: Path, kind: str | None, minimum: int | None, expected: list[str]
) -> None:
    words = {} if minimum is None else {"minimum_words": minimum}
    assert rows(corpus(tmp_path, ARTICLES, rows=kind, **words)) == expected


def test_each_row_and_word_is_kept_or_dropped(tmp_path: Path) -> None:
    assert accounting(corpus(tmp_path, ARTICLES, rows="lines", minimum_words=4)) == RowAccounting(
        rows_read=8, rows_kept=3, rows_dropped=5, words_read=24, words_kept=15, words_dropped=9
    )
    assert accounting(corpus(tmp_path, ARTICLES, minimum_words=6)) == RowAccounting(
        rows_read=5, rows_kept=2, rows_dropped=3, words_read=24, words_kept=19, words_dropped=5
    ), "where documents stay whole, the blank ones are rows as well"
    assert accounting(corpus(tmp_path, ARTICLES, rows="paragraphs")).words_dropped == 0


@pytest.mark.parametrize("kind", ["lines", "paragraphs", None])
def test_rows_from_a_start_are_the_tail_of_all_rows_with_the_accounting_of_all(
    tmp_path: Path, kind: str | None
) -> None:
    texts = ["\n\n".join(sentences(n % 7, seed=n)) for n in range(20)]
    everything = list(corpus(tmp_path, texts, rows=kind, minimum_words=40).documents())
    expected = accounting(corpus(tmp_path, texts, rows=kind, minimum_words=40))
    assert len(everything) == expected.rows_kept > 10
    assert expected.rows_dropped > 3
    for start in (0, 1, 7, len(everything) - 1, len(everything), len(everything) + 1):
        found = corpus(tmp_path, texts, rows=kind, minimum_words=40)
        assert isinstance(found, RowCorpus)
        assert list(found.documents(start)) == everything[start:]
        assert found.accounting == expected


@pytest.mark.parametrize("start", [0, 1, 2])
def test_only_so_many_of_the_rows_that_are_kept_are_taken(tmp_path: Path, start: int) -> None:
    keys: dict[str, Any] = {"rows": "lines", "minimum_words": 2}
    everything = [document.text for document in corpus(tmp_path, ARTICLES, **keys).documents()]
    found = corpus(tmp_path, ARTICLES, **keys, maximum_rows=2)

    assert len(everything) > 2
    assert [document.text for document in found.documents(start)] == everything[start:2]
    assert isinstance(found, RowCorpus)
    assert found.accounting is not None
    assert found.accounting.rows_kept == 2


def test_a_filter_that_keeps_nothing_is_refused_with_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        rows(corpus(tmp_path, ARTICLES * 300, rows="lines", minimum_words=7))
    assert str(caught.value) == (
        "source 'wiki' keeps no row: data.sources.wiki.minimum_words is 7, and its 2,400 rows have 3.0 words on "
        "average; lower it, or cut rows in another way (data.sources.wiki.rows)"
    )
    assert rows(corpus(tmp_path, ["", "\n"], rows="lines", minimum_words=7)) == [], "no row at all: nothing to blame"


def test_an_accounting_that_loses_a_row_or_word_is_refused() -> None:
    whole = {
        "rows_read": 3, "rows_kept": 2, "rows_dropped": 1, "words_read": 9, "words_kept": 7, "words_dropped": 2,
    }  # fmt: skip
    RowAccounting(**whole)
    for name, message in [("rows_dropped", "rows read are not"), ("words_kept", "words read are not")]:
        with pytest.raises(ValueError, match=message):
            RowAccounting(**{**whole, name: whole[name] - 1})
    with pytest.raises(ValueError, match="below zero: rows_kept"):
        RowAccounting(**{**whole, "rows_kept": -1, "rows_dropped": 4})


def test_values_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"rows \(lines\) and document_separator \(blank_line\) both cut"):
        source("text", rows="lines", document_separator="blank_line")


def test_text_files_and_rows_of_documents_are_cut_alike(tmp_path: Path) -> None:
    for number, text in enumerate(ARTICLES):
        (tmp_path / f"{number}.txt").write_bytes(text.encode())
    for kind, separator in (("lines", "line"), ("paragraphs", "blank_line")):
        expected = rows(open_corpus("wiki", source("text", path=tmp_path, document_separator=separator)))
        assert rows(open_corpus("wiki", source("text", path=tmp_path, rows=kind))) == expected != []
    assert rows(open_corpus("wiki", source("text", path=tmp_path, minimum_words=6))) == [
        ARTICLES[0],
        ARTICLES[4],
    ]
