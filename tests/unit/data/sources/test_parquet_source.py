"""Parquet files as sources: documents from any number on, errors with file and row, and the reader of `inspect`."""

from pathlib import Path
from typing import get_args

import pyarrow as pa
import pyarrow.parquet
import pytest
from prepared_files import Recorder, StopAfter, StoppedError, contents, data_config, sentences

from evenpack.data.prepare.prepare import prepare
from evenpack.data.sources.config import ParquetSource, Source
from evenpack.data.sources.corpus import Document
from evenpack.data.sources.kinds import KINDS, open_corpus, source_inputs
from evenpack.data.sources.tables import ParquetTable
from evenpack.errors import DataError
from evenpack.studies.lengths.options import SubjectOptions
from evenpack.studies.lengths.reading import read_histogram


def write(path: Path, texts: list[str | None], *, rows_in_group: int = 7, type_: pa.DataType | None = None) -> Path:
    table = pa.table({"id": list(range(len(texts))), "text": pa.array(texts, type_ or pa.string())})
    pa.parquet.write_table(table, path, row_group_size=rows_in_group)
    return path


def source(path: Path, text_key: str = "text") -> ParquetSource:
    return ParquetSource(kind="parquet", path=path, text_key=text_key)


def read(path: Path, start: int = 0) -> list[Document]:
    return list(open_corpus("wiki", source(path)).documents(start))


def refusal(path: Path, text_key: str = "text") -> str:
    with pytest.raises(DataError) as caught:
        list(open_corpus("wiki", source(path, text_key)).documents())
    return str(caught.value)


def test_every_kind_of_the_run_file_is_registered_under_its_name() -> None:
    kinds = [get_args(section.model_fields["kind"].annotation)[0] for section in get_args(get_args(Source)[0])]
    assert sorted(kinds) == sorted(KINDS)


@pytest.mark.parametrize("type_", [pa.string(), pa.large_string()])
def test_the_strings_of_a_column_are_the_documents_of_all_files_in_order(tmp_path: Path, type_: pa.DataType) -> None:
    texts = [f"fünf {number} " * (number % 5) for number in range(50)]
    write(tmp_path / "b.parquet", list(texts[20:]), type_=type_)
    write(tmp_path / "a.parquet", list(texts[:20]), type_=type_)
    (tmp_path / "notes.txt").write_text("no table")
    documents = read(tmp_path)
    assert [document.text for document in documents] == texts
    assert documents[3].text_bytes == len(texts[3].encode())
    assert documents[-1].bytes_read == open_corpus("wiki", source(tmp_path)).total_bytes
    read_so_far = [document.bytes_read for document in documents]
    assert read_so_far == sorted(read_so_far)
    assert [Path(file.path).name for file in source_inputs("wiki", source(tmp_path))] == ["a.parquet", "b.parquet"]


@pytest.mark.parametrize("start", [0, 1, 6, 7, 8, 19, 20, 21, 33, 49, 50, 99])
def test_documents_from_a_number_on_are_the_tail_of_all(tmp_path: Path, start: int) -> None:
    write(tmp_path / "a.parquet", [f"text {number}" for number in range(20)])
    write(tmp_path / "b.parquet", [f"text {number}" for number in range(20, 50)], rows_in_group=4)
    assert read(tmp_path, start) == read(tmp_path)[start:]


def test_row_groups_before_the_first_requested_row_are_not_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", ["x" * 10_000 + str(number) for number in range(20)], rows_in_group=10)
    second = pa.parquet.ParquetFile(path).metadata.row_group(1).column(0)
    begin = min(offset for offset in (second.dictionary_page_offset, second.data_page_offset) if offset)
    with path.open("r+b") as file:  # the first group can be read no more
        file.seek(4)
        file.write(b"\xff" * (begin - 4))
    assert [document.text[-2:] for document in read(tmp_path, 10)] == [str(number) for number in range(10, 20)]
    assert "a.parquet is not readable as parquet" in refusal(tmp_path)


def test_what_is_wrong_is_named_with_file_and_row(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", ["one", "two", None], rows_in_group=2)
    assert f"{path}, row 2 (from 0): 'text' is null, expected a string" in refusal(path)
    assert f"{path} has no column 'body'; existing columns: id, text. Set the source's" in refusal(path, "body")
    assert f"column 'id' of {path} must be of strings, found int64" in refusal(path, "id")
    (tmp_path / "b.parquet").write_bytes(b"no parquet")
    assert "b.parquet is not readable as parquet" in refusal(tmp_path / "b.parquet")
    assert "folder" in refusal(tmp_path / "none.parquet") or "does not exist" in refusal(tmp_path / "none.parquet")
    broken = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pa.py_buffer(b"a\xff")]
    )
    pa.parquet.write_table(pa.table({"text": broken}), tmp_path / "c.parquet")
    assert "c.parquet, row 1 (from 0): 'text' is not valid UTF-8" in refusal(tmp_path / "c.parquet")


def test_a_table_without_rows_has_no_document(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", [])
    assert read(tmp_path) == []


def test_prepare_reads_parquet_as_jsonl_and_resumes_where_it_was(
    tmp_path: Path, corpus: Path, small_batches: None
) -> None:
    write(tmp_path / "wiki.parquet", list(sentences(150, seed=2)), rows_in_group=40)
    config = data_config({"code": {"kind": "parquet", "path": tmp_path / "wiki.parquet"}})
    prepare(data_config({"code": {"kind": "jsonl", "path": corpus / "code.jsonl"}}), tmp_path / "jsonl")
    with pytest.raises(StoppedError):
        prepare(config, tmp_path / "parquet", progress=StopAfter(5))
    recorder = Recorder()
    prepare(config, tmp_path / "parquet", progress=recorder)
    assert recorder.states[0].bytes_resumed > 0
    found, expected = (
        {name: content for name, content in contents(tmp_path / kind / "sources").items() if "journal" not in name}
        for kind in ("parquet", "jsonl")
    )
    assert found == expected


def test_inspect_counts_the_same_rows_by_the_same_reader(tmp_path: Path) -> None:
    pa.parquet.write_table(pa.table({"n": [1, 2, 2, 5]}), tmp_path / "lengths.parquet", row_group_size=3)
    assert read_histogram(str(tmp_path / "lengths.parquet"), SubjectOptions(column="n")).counts.tolist() == [
        1,
        2,
        0,
        0,
        1,
    ]
    assert ParquetTable(tmp_path / "lengths.parquet").count == 4
