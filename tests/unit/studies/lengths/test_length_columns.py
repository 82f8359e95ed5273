"""Columns of tables as lengths: parquet, comma-separated values, lines of JSON."""

import gzip
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
from backports import zstd
from prepared_files import Recorder
from wordpiece import write_vocabulary

from evenpack.data.sources import tables
from evenpack.errors import ConfigError, DataError, EvenpackError
from evenpack.studies.lengths.options import SubjectOptions
from evenpack.studies.lengths.reading import read_histogram

ROWS: dict[str, list[Any]] = {
    "n": [3, 1, 3, 7, 2, 3],
    "input_ids": [[1, 2], [5], [7, 8, 9], [4], [4, 4], [1]],
    "text": ["the cat", "the cats", "it.", "", "on the mat", "sat"],
    "other": ["it", "it", "", "on", "cats", "the"],
    "share": [0.5, 1.0, 2.0, 3.0, 4.0, 5.0],
}
OF_COLUMN = {
    "n": [1, 1, 3, 0, 0, 0, 1],
    "input_ids": [3, 2, 1],
    "text": [0, 1, 1, 2, 2],
    "pair": [0, 0, 0, 1, 2, 1, 1, 1],
}
"""Counts by length, by hand: [CLS] the cat [SEP] are four tokens, "cats" is two."""

Writer = Callable[[Path, dict[str, list[Any]]], str]


def write_parquet(folder: Path, columns: dict[str, list[Any]]) -> str:
    pyarrow.parquet.write_table(pa.table(columns), folder / "some.parquet", row_group_size=2)
    return str(folder / "some.parquet")


def write_dictionaries(folder: Path, columns: dict[str, list[Any]]) -> str:
    """Writes texts and numbers stored once and referred to, as pandas stores categories."""
    table = pa.table({name: pa.array(values) for name, values in columns.items()})
    for index, name in enumerate(table.column_names):
        if not pa.types.is_list(table.schema.field(name).type):
            table = table.set_column(index, name, table.column(name).dictionary_encode())
    pyarrow.parquet.write_table(table, folder / "categories.parquet", row_group_size=4)
    return str(folder / "categories.parquet")


def write_csv(folder: Path, columns: dict[str, list[Any]], suffix: str = ".csv") -> str:
    table = pa.table({name: values for name, values in columns.items() if name != "input_ids"})
    options = pyarrow.csv.WriteOptions(delimiter="\t" if suffix == ".tsv" else ",")
    pyarrow.csv.write_csv(table, folder / f"some{suffix}", write_options=options)
    return str(folder / f"some{suffix}")


def write_lines(
    folder: Path, columns: dict[str, list[Any]], suffix: str = "", compress: Callable[[bytes], bytes] = bytes
) -> str:
    rows = zip(*columns.values(), strict=True)
    lines = b"".join(json.dumps(dict(zip(columns, row, strict=True))).encode() + b"\n\n" for row in rows)
    (folder / f"some.jsonl{suffix}").write_bytes(compress(lines))
    return str(folder / f"some.jsonl{suffix}")


WITH_LISTS: list[Writer] = [
    *(write_parquet, write_dictionaries, write_lines),
    partial(write_lines, suffix=".zst", compress=zstd.compress),
    partial(write_lines, suffix=".gz", compress=gzip.compress),
]
WRITERS = [*WITH_LISTS, write_csv, partial(write_csv, suffix=".tsv")]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_vocabulary(tmp_path_factory.mktemp("tokenizers") / "bert")


def counts(source: str, **options: str) -> list[int]:
    return read_histogram(source, SubjectOptions(**options)).counts.tolist()  # type: ignore[arg-type]


@pytest.mark.parametrize("write", WRITERS)
def test_integers_lists_and_texts_of_every_format_become_lengths(write: Writer, tmp_path: Path, tokenizer: str) -> None:
    source = write(tmp_path, ROWS)
    if write in WITH_LISTS:
        assert counts(source, column="input_ids") == OF_COLUMN["input_ids"]
    assert counts(source, column="n") == OF_COLUMN["n"]
    assert counts(source, column="text", tokenizer=tokenizer) == OF_COLUMN["text"]
    assert counts(source, tokenizer=tokenizer) == OF_COLUMN["text"]
    assert counts(source, column="text,other", tokenizer=tokenizer) == OF_COLUMN["pair"]
    only = {"text": ["a", "b"], "size": [2, 3], "share": [0.5, 2.0]}
    assert counts(write(tmp_path, only)) == [0, 1, 1], "the only column of integers"


@pytest.mark.parametrize("kind", [pa.large_list(pa.int32()), pa.list_(pa.int32(), 3), pa.uint8(), pa.uint64()])
def test_other_types_of_parquet_count_too(kind: Any, tmp_path: Path) -> None:
    values = [3, 3] if pa.types.is_integer(kind) else [[1, 2, 3], [4, 5, 6]]
    pyarrow.parquet.write_table(pa.table({"x": pa.array(values, kind)}), tmp_path / "some.parquet")
    assert counts(str(tmp_path / "some.parquet")) == [0, 0, 2]


@pytest.mark.parametrize("write", WITH_LISTS)
def test_several_candidates_are_listed_with_their_types(write: Writer, tmp_path: Path, tokenizer: str) -> None:
    source = write(tmp_path, ROWS)
    with pytest.raises(DataError, match=r"has 2 columns of integers or lists.*columns: n \(.*int64.*input_ids \(list<"):
        counts(source)
    with pytest.raises(DataError, match=r"has 2 columns of text: choose one with --column; columns: a \("):
        counts(write(tmp_path, {"a": ["x"], "b": ["y"]}), tokenizer=tokenizer)
    with pytest.raises(DataError, match="has 0 columns of integers"):
        counts(write(tmp_path, {"text": ["x"]}))


@pytest.mark.parametrize("write", WRITERS)
def test_a_column_that_is_not_there_is_reported_with_those_that_are(
    write: Writer, tmp_path: Path, tokenizer: str
) -> None:
    source = write(tmp_path, ROWS)
    with pytest.raises(
        DataError, match=r"has no column 'shore'; did you mean 'share'\? known: .*n, other, share, text"
    ):
        counts(source, column="shore")
    with pytest.raises(DataError, match="has no column 'text2'; did you mean 'text'"):
        counts(source, column="text,text2", tokenizer=tokenizer)


@pytest.mark.parametrize("write", WITH_LISTS)
def test_text_needs_a_tokenizer_and_a_tokenizer_needs_text(write: Writer, tmp_path: Path, tokenizer: str) -> None:
    source = write(tmp_path, ROWS)
    with pytest.raises(ConfigError, match=r"column 'text' of .* is text .*need --tokenizer"):
        counts(source, column="text")
    for column in ("n", "input_ids", "text,n"):
        with pytest.raises(ConfigError, match="--tokenizer makes lengths of text, but column"):
            counts(source, column=column, tokenizer=tokenizer)
    with pytest.raises(ConfigError, match="two columns are the texts of a pair"):
        counts(source, column="text,other,text", tokenizer=tokenizer)
    with pytest.raises(ConfigError, match="--column text,text names a column twice"):
        counts(source, column="text,text", tokenizer=tokenizer)


BAD_VALUES: dict[str, tuple[list[Any], str]] = {
    "zero": ([3, 0], "a length must be 1 or more, found 0"),
    "negative": ([3, -4], "a length must be 1 or more, found -4"),
    "too great": ([3, 1 << 40], "a length must be 16777216 or less, found 1099511627776"),
    "null": ([3, None], "'n' is null"),
    "a fraction": ([3.0, 2.5], "a length must be a whole number, found 2.5"),
}


@pytest.mark.parametrize("case", BAD_VALUES)
@pytest.mark.parametrize("write", WRITERS)
def test_a_value_that_is_no_length_is_named_with_its_row(write: Writer, case: str, tmp_path: Path) -> None:
    values, message = BAD_VALUES[case]
    source = write(tmp_path, {"n": values})
    with pytest.raises(DataError, match=rf"{source}, row 1 \(from 0\): .*{message}"):
        counts(source, column="n")


@pytest.mark.parametrize("write", WITH_LISTS)
def test_an_empty_list_and_a_missing_text_have_no_length(write: Writer, tmp_path: Path, tokenizer: str) -> None:
    with pytest.raises(DataError, match=r"row 1 \(from 0\): a length .* found 0"):
        counts(write(tmp_path, {"input_ids": [[1], []]}), column="input_ids")
    with pytest.raises(DataError, match=r"row 1 \(from 0\): 'text' is null"):
        counts(write(tmp_path, {"text": ["it", None]}), tokenizer=tokenizer)


@pytest.mark.parametrize("write", [write_parquet, write_lines])
def test_a_column_of_nothing_is_named_with_its_first_row(write: Writer, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"row 0 \(from 0\): 'n' is null"):
        counts(write(tmp_path, {"n": [None, None]}), column="n")


def test_cells_may_hold_spaces_quotes_and_line_ends(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.csv").write_text('text,n\n"the\ncat, it",3\n\n"a ""cat""",4\n')
    assert counts(str(tmp_path / "a.csv"), column="n") == [0, 0, 1, 1]
    assert counts(str(tmp_path / "a.csv"), tokenizer=tokenizer) == [0, 0, 0, 0, 0, 2]  # comma and quotes are tokens
    monkeypatch.setattr(tables, "_BLOCK_BYTES", 100)
    (tmp_path / "b.csv").write_text("text,n\n" + '"the\n\ncat,1\nit",2\n' * 100)
    assert counts(str(tmp_path / "b.csv"), column="n") == [0, 100]


@pytest.mark.parametrize("write", [write_parquet, write_csv])
def test_a_table_without_rows_is_empty(write: Writer, tmp_path: Path) -> None:
    source = write(tmp_path, {"n": pa.array([], pa.int64())})  # type: ignore[dict-item]
    with pytest.raises(DataError, match=f"{source} holds no sequence"):
        counts(source, column="n")


BROKEN_FILES = {
    "no parquet file": ("a.parquet", b"PAR1 nothing PAR1", "is not readable as parquet"),
    "a row of too few cells": ("a.csv", b"n,m\n1,2\n3\n", "is not readable as csv: .*Expected 2 columns, got 1"),
    "two columns of one name": ("a.csv", b"n,n\n1,2\n", "has 2 columns 'n': rename all but one"),
    "no UTF-8": ("a.csv", "n\n3\n".encode("utf-16"), "is not readable as csv"),
    "lists in a list": ("a.jsonl", b'{"n": [[1, 2], [3]]}\n', "column 'n' of .* is list.* lists of no further lists"),
    "bare lengths": ("a.csv", b"3\n4\n", "begins with the numbers 3 where a header row was expected"),
    "no JSON": ("a.jsonl", b'{"n": 3}\n{"n": \n', "is not readable as JSON lines: .* in row 1"),
    "another key": ("a.jsonl", b'{"n": 3}\n\n{"m": 3}\n', r"row 1 \(from 0\): 'n' is null"),
    "another type": ("a.jsonl", b'{"n": 3}\n{"n": "3"}\n', "changed from number to string in row 1"),
    "a number beyond 64 bits": ("a.jsonl", b'{"n": 99999999999999999999}\n', "a length must be 16777216 or less"),
    "a cut gzip file": ("a.jsonl.gz", gzip.compress(b'{"n": 3}\n' * 99)[:-12], "ended before"),
    "a damaged zstd file": ("a.jsonl.zst", zstd.compress(b'{"n": 3}\n') + b"junk", "is not readable as JSON lines"),
    "a file that is not there": ("a/a.csv", None, "cannot be read: No such file"),
}


@pytest.mark.parametrize("case", BROKEN_FILES)
def test_a_broken_file_is_named_with_what_is_wrong(case: str, tmp_path: Path) -> None:
    name, content, message = BROKEN_FILES[case]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        counts(str(tmp_path / name), column="n")


def test_a_frame_with_a_window_of_two_gibibytes_can_be_read(tmp_path: Path) -> None:
    compressor = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 31})
    (tmp_path / "a.jsonl.zst").write_bytes(compressor.compress(b'{"n": 3}\n') + compressor.flush())
    assert counts(str(tmp_path / "a.jsonl.zst"), column="n") == [0, 0, 1]


def test_text_that_is_no_unicode_is_refused(tmp_path: Path, tokenizer: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "it"}\n{"text": "the \xff"}\n')
    with pytest.raises(DataError, match="is not readable as JSON lines"):
        counts(str(tmp_path / "a.jsonl"), tokenizer=tokenizer)


@pytest.mark.parametrize("late", [b'{"n": "3"}\n', b'{"m": 3}\n', b"3\n"])
def test_rows_beyond_the_first_block_have_its_columns(
    late: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "_BLOCK_BYTES", 100)
    (tmp_path / "a.jsonl").write_bytes(b'{"n": 3}\n' * 100 + b'{"n": 3, "later": 1}\n')
    assert counts(str(tmp_path / "a.jsonl"), column="n") == [0, 0, 101]
    with (tmp_path / "a.jsonl").open("ab") as file:
        file.write(late)
    with pytest.raises(DataError):
        counts(str(tmp_path / "a.jsonl"), column="n")


def test_long_tables_are_read_in_parts_and_every_row_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: str
) -> None:
    monkeypatch.setattr(tables, "ROWS_AT_ONCE", 16)
    monkeypatch.setattr(tables, "LONG_ROWS_AT_ONCE", 8)
    monkeypatch.setattr(tables, "_BLOCK_BYTES", 256)
    values = np.random.default_rng(0).integers(1, 30, 300)
    expected = np.bincount(values)[1:].tolist()
    texts = ["it " * (value - 1) for value in values]
    for write in WRITERS:
        source = write(tmp_path, {"n": values.tolist(), "text": texts})
        recorder = Recorder()
        assert counts(source, column="n") == expected, source
        with_text = SubjectOptions(column="text", tokenizer=tokenizer)
        found = read_histogram(source, with_text, progress=recorder)
        assert found.counts.tolist() == [0, *expected], source
        heard = recorder.states
        assert len(heard) > 3, source
        assert not recorder.notes
        assert [state.documents for state in heard] == sorted(state.documents for state in heard)
        last = heard[-1]
        assert (last.documents, last.tokens) == (300, int(values.sum()) + 300)
        assert last.bytes_read == last.total_bytes == Path(source).stat().st_size
        with pytest.raises(EvenpackError, match=r"row 250 \(from 0\): .* found 0"):
            counts(write(tmp_path, {"n": [*values.tolist()[:250], 0, *values.tolist()[250:]]}), column="n")
