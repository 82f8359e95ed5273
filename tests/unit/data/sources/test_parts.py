"""The concatenated parts of a corpus are the corpus, for every kind and any bounds."""

import json
import pickle
from collections.abc import Iterable
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any, get_args

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest
from backports import zstd
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from evenpack.data.sources import lines as lines_module
from evenpack.data.sources.config import Source
from evenpack.data.sources.corpus import Corpus, CorpusPart, JoinedPieces
from evenpack.data.sources.kinds import KINDS, open_corpus
from evenpack.data.sources.rows import RowAccounting, RowCorpus, RowPart
from evenpack.errors import DataError

TEXTS = [f"{'ä€😀 xyz'[: n % 7]} {n}\n{'word ' * (n % 4)}" for n in range(60)]

LINES = (
    b"\xef\xbb\xbf{}\n"  # a byte order mark
    b'{"text": "one"}\r\n'
    b"\n"
    b'{"text": "zw\xc3\xb6lf"}\n'
    b"  \r\n"
    b'{"text": "\xf0\x9f\x98\x80\xf0\x9f\x98\x80"}\n'
    b"\n\n"
    b'{"text": ""}\n'
    b'{"text": "no end of line"}'
).replace(b"{}", b'{"text": "begin"}')

PROSE = (
    b"\xef\xbb\xbfone\r\ntwo\r\n \t\r\n\r\n\xef\xbb\xbfthr\xc3\xa9\xc3\xa9\n\n  \nfour \xf0\x9f\x98\x80 \n\n\nfive\nsix"
)


def corpus(kind: str, **keys: Any) -> Corpus:
    return open_corpus("wiki", TypeAdapter(Source).validate_python({"kind": kind, **keys}))


def contents_of(streams: Iterable[Corpus | CorpusPart]) -> list[tuple[str, int]]:
    return [(document.text, document.identity) for stream in streams for document in stream.documents()]


def ranges_of(part: CorpusPart) -> list[tuple[int, int | None]]:
    """Returns the bytes or rows, of one file each, of which a part consists."""
    assert isinstance(part, JoinedPieces)
    pieces: tuple[Any, ...] = part.pieces
    return [(piece.begin, piece.stop) for piece in pieces]


def check(corpus: Corpus, target_bytes: int) -> int:
    """Raises AssertionError unless the parts are the corpus. Returns: how many they are."""
    parts = corpus.parts(target_bytes)
    assert contents_of(parts) == contents_of([corpus])
    sizes = [part.total_bytes for part in parts]
    assert sum(sizes) == corpus.total_bytes
    assert [part.total_bytes for part in corpus.parts(target_bytes)] == sizes, "the same files give the same parts"
    for part in parts:
        copy = pickle.loads(pickle.dumps(part))
        documents = list(part.documents())
        assert list(copy.documents()) == documents
        assert list(copy.documents(3)) == documents[3:]
        read = [0, *(document.bytes_read for document in documents), part.total_bytes]
        assert read == sorted(read)
    return len(parts)


def write_tables(folder: Path) -> None:
    """Writes the texts in files and row groups of several sizes."""
    table = pa.table({"id": list(range(60)), "text": TEXTS})
    pa.parquet.write_table(table[:20], folder / "a.parquet", row_group_size=7)
    pa.parquet.write_table(table[20:20], folder / "b.parquet")
    pa.parquet.write_table(table[20:], folder / "c.parquet", row_group_size=11)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes one folder for each kind."""
    folder = tmp_path_factory.mktemp("parts")
    for name in ("jsonl", "text", "tables", "hub"):
        (folder / name).mkdir()
    lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in TEXTS).encode()
    (folder / "jsonl" / "a.jsonl").write_bytes(LINES)
    (folder / "jsonl" / "b.jsonl.zst").write_bytes(zstd.compress(lines))
    (folder / "jsonl" / "c.jsonl").write_bytes(b"")
    (folder / "jsonl" / "d.jsonl").write_bytes(lines)
    (folder / "hub" / "train.jsonl").write_bytes(lines)
    (folder / "text" / "a.txt").write_bytes(PROSE)
    (folder / "text" / "b.txt").write_bytes(PROSE + b"\n\n")
    write_tables(folder / "tables")
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(folder / "saved", num_shards=3)
    return folder


SOURCES: list[tuple[str, dict[str, Any], bool]] = [
    ("hub", {"name": "hub"}, False),
    ("jsonl", {"path": "jsonl"}, True),
    *(
        ("text", {"path": "text", "document_separator": separator}, True)
        for separator in ("file", "blank_line", "line")
    ),
    ("parquet", {"path": "tables"}, True),
    ("hub", {"name": "saved"}, False),
]
"""Kind, keys, and whether it has more than one part."""


@pytest.mark.parametrize(("kind", "keys", "many"), SOURCES, ids=str)
def test_the_parts_of_every_kind_are_the_corpus(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, keys: dict[str, Any], many: bool
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", folder / "cache")
    choices: list[dict[str, Any]] = [{}, {"rows": "lines", "minimum_words": 2}]
    if keys.get("document_separator", "file") != "file":
        del choices[1]  # such a source is cut already
    for choice in choices:
        found = corpus(kind, **keys, **choice)
        counts = [check(found, size) for size in (1, 150, 600, 1 << 30)]
        assert counts == sorted(counts, reverse=True)
        assert counts[-1] == 1, "all that fits is joined"
        assert (counts[0] > 1) == many


def test_every_kind_is_registered_under_its_name_and_those_with_text_are_tried() -> None:
    kinds = [get_args(section.model_fields["kind"].annotation)[0] for section in get_args(get_args(Source)[0])]
    assert sorted(kinds) == sorted(KINDS)
    assert {kind for kind, *_ in SOURCES} == KINDS.keys() - {"builtin", "megatron", "hdf5"}


def test_the_builtin_corpus_is_one_part() -> None:
    found = corpus("builtin")
    (part,) = found.parts(1)
    assert part is found, "and so the documents are the same; a pass takes seconds"
    assert pickle.loads(pickle.dumps(part)).total_bytes == found.total_bytes


@pytest.mark.parametrize("content", [LINES, LINES.replace(b"\n", b"\r\n") + b"\r\n", b"\n\n", b""])
def test_jsonl_may_be_cut_at_any_byte(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    found = corpus("jsonl", path=tmp_path)
    sizes = [*range(1, 60), max(1, len(content)), len(content) + 1]
    counts = [check(found, size) for size in sizes]
    lines = content.split(b"\n")
    assert counts[0] == max(1, len(lines) - (lines[-1] == b"")), "a target of one byte makes a part of each line"
    assert counts[-2:] == [1, 1]


@pytest.mark.parametrize("piece_bytes", [1, 3])
@pytest.mark.parametrize("separator", ["line", "blank_line"])
@given(
    lines=st.lists(st.sampled_from(["", " ", "a", "zwölf", "  😀", "\ufeffb", "c \t", "\u3000", "d\re"]), max_size=12)
)
@settings(max_examples=15)
def test_text_may_be_cut_between_any_documents(
    tmp_path_factory: pytest.TempPathFactory, piece_bytes: int, separator: str, lines: list[str]
) -> None:
    path = tmp_path_factory.mktemp("text") / "a.txt"
    for end in ("\n", "\r\n"):
        path.write_bytes(end.join(lines).encode())
        found = corpus("text", path=path, document_separator=separator)
        for size in (1, 3, 7):
            check(found, size)
            parts = found.parts(size)
            with pytest.MonkeyPatch.context() as patch:  # however long a line is, its pieces lead to the same end
                patch.setattr(lines_module, "_PIECE_BYTES", piece_bytes)
                assert found.parts(size) == parts


def test_a_mistake_in_a_part_is_named_by_its_line_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for bad, message in (
        (b"{broken\n", "not a readable JSON line"),
        (b'{"text": "\xff"}\n', "at byte 5310 of the file"),
    ):
        path.write_bytes(b'\n{"text": "fine"}\n' * 300 + bad + b'{"text": "fine"}\n' * 100)
        parts = corpus("jsonl", path=path).parts(500)
        messages = []
        for part in parts:
            try:
                list(part.documents())
            except DataError as error:
                messages.append(str(error))
        assert len(parts) > 10
        (found,) = messages
        assert f"{path}, line 601: " in found
        assert message.replace("5310", str(18 * 300 + 10)) in found


def test_a_part_of_parquet_reads_its_own_row_groups_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"text": ["x" * 10_000 + str(number) for number in range(30)]})
    pa.parquet.write_table(table, path, row_group_size=10, compression="none", use_dictionary=False)
    parts = corpus("parquet", path=path).parts(100_000)
    assert [ranges_of(part) for part in parts] == [[(n, n + 10)] for n in (0, 10, 20)]
    joined = corpus("parquet", path=path).parts(250_000)
    assert [ranges_of(part) for part in joined] == [[(0, 20)], [(20, 30)]]
    second = pa.parquet.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    with path.open("r+b") as file:
        file.seek(4)
        file.write(b"\xff" * (second - 4))
    assert [document.text[-2:] for document in parts[1].documents(8)] == ["18", "19"]
    with pytest.raises(DataError, match=r"a\.parquet is not readable as parquet"):
        list(parts[0].documents())


def test_what_is_wrong_in_a_part_is_named_by_its_row_in_the_file(tmp_path: Path) -> None:
    table = pa.table({"text": ["fine"] * 25 + [None]})
    pa.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=10)
    *_, last = corpus("parquet", path=tmp_path / "a.parquet").parts(1)
    with pytest.raises(DataError) as caught:
        list(last.documents())
    assert f"{tmp_path / 'a.parquet'}, row 25 (from 0): 'text' must be a string, found null" in str(caught.value)


def accounting_of_parts(found: Corpus, target_bytes: int) -> list[RowAccounting]:
    """Returns the accounting of each part, which it has when all of it was read."""
    parts = found.parts(target_bytes)
    for part in parts:
        list(part.documents())
    return [part.accounting for part in parts if isinstance(part, RowPart) and part.accounting is not None]


def test_the_accounting_of_rows_is_joined_from_that_of_the_parts(folder: Path) -> None:
    found = corpus("jsonl", path=folder / "jsonl", rows="lines", minimum_words=3)
    counted = accounting_of_parts(found, 100)
    assert any(not accounting.rows_kept for accounting in counted), "no mistake while other parts keep some"
    list(found.documents())
    assert isinstance(found, RowCorpus)
    assert reduce(add, counted) == found.accounting


def test_rows_that_no_part_keeps_are_refused_as_in_one_pass(folder: Path) -> None:
    found = corpus("jsonl", path=folder / "jsonl", rows="lines", minimum_words=9)
    assert isinstance(found, RowCorpus)
    total = reduce(add, accounting_of_parts(found, 300))
    messages = []
    for attempt in (lambda: found.refuse_none_kept(total), lambda: list(found.documents())):
        with pytest.raises(DataError) as caught:
            attempt()
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert "minimum_words is 9" in messages[0]


def test_a_number_of_rows_to_take_makes_one_part(folder: Path) -> None:
    found = corpus("jsonl", path=folder / "jsonl", rows="lines", maximum_rows=20)
    assert check(found, 100) == 1
    assert len(contents_of([found])) == 20
