"""Parquet files as sources: documents from any number on, errors with file and row, and the reader of `inspect`."""

from pathlib import Path
from typing import get_args

import pyarrow as pa
import pyarrow.parquet
import pytest

from evenpack.data.sources.config import ParquetSource, Source
from evenpack.data.sources.corpus import Document
from evenpack.data.sources.kinds import KINDS, open_corpus
from evenpack.errors import DataError


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
