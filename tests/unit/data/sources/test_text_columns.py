"""Columns of text are read from parquet, and from folders of `save_to_disk` through `datasets`."""

import random
import re
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest

from evenpack.config import validate
from evenpack.data.config import DataConfig
from evenpack.data.sources.config import HubSource, ParquetSource
from evenpack.data.sources.corpus import Document
from evenpack.data.sources.kinds import open_corpus, source_inputs
from evenpack.errors import ConfigError, DataError

TEXTS = [f"fünf {number} " * (number % 5) for number in range(50)]


def write(path: Path, table: pa.Table, *, rows_in_group: int = 7) -> Path:
    pa.parquet.write_table(table, path, row_group_size=rows_in_group)
    return path


def texts_table(texts: list[str | None], type_: pa.DataType | None = None) -> pa.Table:
    return pa.table({"id": list(range(len(texts))), "text": pa.array(texts, type_ or pa.string())})


def read(path: Path, start: int = 0, **keys: Any) -> list[Document]:
    source = (
        HubSource(kind="hub", name=str(path), **keys)
        if path.is_dir()
        else ParquetSource(kind="parquet", path=path, **keys)
    )
    return list(open_corpus("wiki", source).documents(start))


def refusal(path: Path, **keys: Any) -> str:
    with pytest.raises(DataError) as caught:
        read(path, **keys)
    return str(caught.value)


def save(dataset: Any, folder: Path, **keys: Any) -> Path:
    datasets.disable_progress_bars()
    dataset.save_to_disk(folder, **keys)
    return folder


@pytest.mark.parametrize("type_", [
    pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string()),
    pa.dictionary(pa.int8(), pa.large_string()),
], ids=str)  # fmt: skip
def test_strings_of_every_type_are_the_documents(tmp_path: Path, type_: pa.DataType) -> None:
    path = write(tmp_path / "a.parquet", texts_table(list(TEXTS), type_))
    documents = read(path)
    assert [document.text for document in documents] == TEXTS
    assert [document.bytes_read for document in documents] == [path.stat().st_size * n // 50 for n in range(1, 51)]
    for start in (1, 6, 7, 8, 49, 50, 99):
        assert read(path, start) == documents[start:]


@pytest.mark.parametrize("type_", [
    pa.binary(), pa.large_binary(), pa.list_(pa.string()), pa.int64(), pa.dictionary(pa.int32(), pa.binary()),
], ids=str)  # fmt: skip
def test_a_column_of_another_type_is_refused_by_its_name_and_type(tmp_path: Path, type_: pa.DataType) -> None:
    values = {pa.int64(): [1], pa.list_(pa.string()): [["a"]]}.get(type_, [b"a"])
    path = write(tmp_path / "a.parquet", pa.table({"text": pa.array(values, type_)}))
    found = pa.parquet.read_schema(path).field("text").type
    assert f"column 'text' of {path} must be of strings, found {found}" in refusal(path)
    assert "has no column 'body'; existing columns: text. Set the source's text_key" in refusal(path, text_key="body")


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    path = write(tmp_path / "a.parquet", table)
    assert f"{path} has 2 columns 'text'" in refusal(path)


def test_a_null_and_invalid_utf8_are_named_by_their_rows(tmp_path: Path) -> None:
    broken = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pa.py_buffer(b"a\xff")]
    )
    null, wrong = texts_table(["a"] * 9 + [None]), pa.table({"text": broken})
    path = write(tmp_path / "null.parquet", null)
    assert f"{path}, row 9 (from 0): 'text' must be a string, found null" in refusal(path)
    path = write(tmp_path / "wrong.parquet", wrong)
    assert f"{path}, row 1 (from 0): 'text' is not valid UTF-8" in refusal(path)
    path = save(datasets.Dataset(null), tmp_path / "null")
    assert f"row 9 of {path}: 'text' must be a string, found null" in refusal(path)
    path = save(datasets.Dataset(wrong), tmp_path / "wrong")
    assert re.search(f"row 1 of {path} is not readable as Arrow: .*Invalid UTF8", refusal(path))


def test_a_row_group_takes_the_memory_of_a_part_of_it(tmp_path: Path) -> None:
    texts = [random.Random(number).randbytes(5_000).hex() for number in range(4_000)]
    path = tmp_path / "a.parquet"
    pa.parquet.write_table(texts_table(list(texts)), path, write_batch_size=64)  # pages of about a MiB
    before = pa.total_allocated_bytes()
    documents = open_corpus("wiki", ParquetSource(kind="parquet", path=path)).documents()
    most = max(pa.total_allocated_bytes() - before for _ in documents)
    assert most < path.stat().st_size / 2
    assert pa.parquet.read_metadata(path).num_row_groups == 1


def test_a_saved_dataset_is_read_as_datasets_reads_it(tmp_path: Path) -> None:
    folder = save(datasets.Dataset(texts_table(list(TEXTS))), tmp_path / "set", num_shards=11)
    documents = read(folder)
    assert [document.text for document in documents] == TEXTS
    assert read(folder, 17) == documents[17:]
    before = source_inputs("wiki", HubSource(kind="hub", name=str(folder)))
    assert "state.json" in {Path(file.path).name for file in before}
    (folder / "data-00003-of-00011.arrow").touch()
    assert source_inputs("wiki", HubSource(kind="hub", name=str(folder))) != before


def test_of_a_saved_dataset_dict_the_named_split_is_read(tmp_path: Path) -> None:
    splits = {name: datasets.Dataset(texts_table([name] * 3)) for name in ("train", "test")}
    folder = save(datasets.DatasetDict(splits), tmp_path / "sets")
    assert [document.text for document in read(folder, split="test")] == ["test"] * 3
    assert [document.text for document in read(folder)] == ["train"] * 3
    assert "it holds train, test: set the source's split" in refusal(folder, split="dev")
    assert "it holds train: set the source's split" in refusal(folder / "train", split="test")
    both = open_corpus("wiki", HubSource(kind="hub", name=str(folder), validation_split="test"))
    assert [(document.text, document.is_held_out) for document in both.documents()] == [
        *([("test", True)] * 3),
        *([("train", False)] * 3),
    ]


def test_a_saved_dataset_that_is_cut_off_or_lacks_a_file_is_refused(tmp_path: Path) -> None:
    folder = save(datasets.Dataset(texts_table(list(TEXTS))), tmp_path / "set", num_shards=2)
    file = folder / "data-00001-of-00002.arrow"
    file.write_bytes(file.read_bytes()[:-8])  # the last record batch is whole
    assert f"{file} is cut off: copy the whole folder again" in refusal(folder)
    file.unlink()
    assert file.name in refusal(folder)


def test_offsets_that_lead_out_of_a_saved_file_are_refused_and_not_followed(tmp_path: Path) -> None:
    folder = save(datasets.Dataset(texts_table(["abc", "defg", "hi"])), tmp_path / "set")
    (path,) = folder.glob("*.arrow")
    content = path.read_bytes()
    offsets = b"".join(number.to_bytes(4, "little") for number in (0, 3, 7, 9))
    assert content.count(offsets) == 1
    path.write_bytes(content.replace(offsets, offsets[:8] + b"\xff\xff\xff\x7f" + offsets[12:]))
    assert f"row 1 of {folder} is not readable as Arrow" in refusal(folder)


def test_a_saved_dataset_has_no_subset(tmp_path: Path) -> None:
    folder = save(datasets.Dataset(texts_table(list(TEXTS))), tmp_path / "set")
    expected = f"source 'wiki': {folder} was written by save_to_disk and has no subsets: leave its subset out"
    assert refusal(folder, subset="en") == expected


def test_an_arrow_file_is_no_kind_of_source(tmp_path: Path) -> None:
    values = {"sources": {"wiki": {"kind": "arrow", "path": tmp_path}}}
    with pytest.raises(ConfigError, match=r"'arrow' found using 'kind' does not match any.*; read a folder of .*: hub"):
        validate(values, DataConfig, origin="run.yaml")
