"""Columns of text in Arrow files and folders of `save_to_disk` are read by the reader of parquet."""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest
from prepared_files import Recorder, StopAfter, StoppedError, contents, data_config, sentences, write_jsonl

from evenpack.data.prepare.prepare import prepare
from evenpack.data.sources.config import ArrowSource, HubSource, ParquetSource
from evenpack.data.sources.corpus import Document
from evenpack.data.sources.kinds import open_corpus, source_inputs
from evenpack.errors import DataError

TEXTS = [f"fünf {number} " * (number % 5) for number in range(50)]

FORMATS = ["stream", "file", "stream lz4", "file zstd", "parquet"]


def write(path: Path, table: pa.Table, format_: str = "stream", *, rows_in_batch: int = 7) -> Path:
    name, _, compression = format_.partition(" ")
    if name == "parquet":
        pa.parquet.write_table(table, path, row_group_size=rows_in_batch)
        return path
    options = pa.ipc.IpcWriteOptions(compression=compression or None)
    create = pa.ipc.new_stream if name == "stream" else pa.ipc.new_file
    with create(path, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=rows_in_batch)
    return path


def texts_table(texts: list[str | None], type_: pa.DataType | None = None) -> pa.Table:
    return pa.table({"id": list(range(len(texts))), "text": pa.array(texts, type_ or pa.string())})


def read(path: Path, start: int = 0, **keys: Any) -> list[Document]:
    kind = ParquetSource if path.suffix == ".parquet" else ArrowSource
    source = kind.model_validate({"kind": "parquet" if kind is ParquetSource else "arrow", "path": path, **keys})
    return list(open_corpus("wiki", source).documents(start))


def refusal(path: Path, **keys: Any) -> str:
    with pytest.raises(DataError) as caught:
        read(path, **keys)
    return str(caught.value)


def save(dataset: Any, folder: Path, **keys: Any) -> Path:
    datasets.disable_progress_bars()
    dataset.save_to_disk(folder, **keys)
    return folder


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("type_", [
    pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string()),
    pa.dictionary(pa.int8(), pa.large_string()),
], ids=str)  # fmt: skip
def test_strings_of_every_type_are_the_documents(tmp_path: Path, format_: str, type_: pa.DataType) -> None:
    path = write(
        tmp_path / ("a.parquet" if format_ == "parquet" else "a.arrow"), texts_table(list(TEXTS), type_), format_
    )
    documents = read(path)
    assert [document.text for document in documents] == TEXTS
    assert [document.bytes_read for document in documents] == [path.stat().st_size * n // 50 for n in range(1, 51)]
    for start in (1, 6, 7, 8, 49, 50, 99):
        assert read(path, start) == documents[start:]


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("type_", [
    pa.binary(), pa.large_binary(), pa.list_(pa.string()), pa.int64(), pa.dictionary(pa.int32(), pa.binary()),
], ids=str)  # fmt: skip
def test_a_column_of_another_type_is_refused_by_its_name_and_type(
    tmp_path: Path, format_: str, type_: pa.DataType
) -> None:
    values = {pa.int64(): [1], pa.list_(pa.string()): [["a"]]}.get(type_, [b"a"])
    path = tmp_path / ("a.parquet" if format_ == "parquet" else "a.arrow")
    write(path, pa.table({"text": pa.array(values, type_)}), format_)
    found = pa.parquet.read_schema(path).field("text").type if format_ == "parquet" else type_
    assert f"column 'text' of {path} must be of strings, found {found}" in refusal(path)
    assert "has no column 'body'; existing columns: text. Set the source's text_key" in refusal(path, text_key="body")


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    for path, format_ in ((tmp_path / "a.arrow", "stream"), (tmp_path / "a.parquet", "parquet")):
        write(path, table, format_)
        assert f"{path} has 2 columns 'text'" in refusal(path)


@pytest.mark.parametrize("format_", FORMATS)
def test_a_null_and_invalid_utf8_are_named_by_their_rows(tmp_path: Path, format_: str) -> None:
    path = tmp_path / ("a.parquet" if format_ == "parquet" else "a.arrow")
    write(path, texts_table(["a"] * 9 + [None]), format_)
    assert f"{path}, row 9 (from 0): 'text' is null, expected a string" in refusal(path)
    broken = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pa.py_buffer(b"a\xff")]
    )
    write(path, pa.table({"text": broken}), format_)
    assert f"{path}, row 1 (from 0): 'text' is not valid UTF-8" in refusal(path)
    if format_ == "parquet":
        return  # Arrow refuses a dictionary that is not UTF-8 as a whole
    write(path, pa.table({"text": pa.DictionaryArray.from_arrays(pa.array([0, 0, 1]), broken)}), format_)
    assert f"{path}, row 2 (from 0): 'text' is not valid UTF-8" in refusal(path)


def test_offsets_that_lead_out_of_the_file_are_refused_and_not_followed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.arrow", texts_table(["abc", "defg", "hi"]))
    content = path.read_bytes()
    offsets = b"".join(number.to_bytes(4, "little") for number in (0, 3, 7, 9))
    assert content.count(offsets) == 1
    path.write_bytes(content.replace(offsets, offsets[:8] + b"\xff\xff\xff\x7f" + offsets[12:]))
    assert f"{path} is not readable as Arrow" in refusal(path)


def test_record_batches_that_are_passed_over_are_not_decoded(tmp_path: Path) -> None:
    for format_ in ("stream", "file"):
        path = write(tmp_path / "a.arrow", texts_table([f"text {number:02}" for number in range(20)]), format_)
        path.write_bytes(path.read_bytes().replace(b"text 03", b"text \xff3"))
        assert [document.text for document in read(path, 7)] == [f"text {number:02}" for number in range(7, 20)]
        assert "row 3 (from 0): 'text' is not valid UTF-8" in refusal(path)


def test_a_row_group_takes_the_memory_of_a_part_of_it(tmp_path: Path) -> None:
    texts = [random.Random(number).randbytes(5_000).hex() for number in range(4_000)]
    path = tmp_path / "a.parquet"
    pa.parquet.write_table(texts_table(list(texts)), path, write_batch_size=64)  # pages of about a MiB
    before = pa.total_allocated_bytes()
    documents = open_corpus("wiki", ParquetSource(kind="parquet", path=path)).documents()
    most = max(pa.total_allocated_bytes() - before for _ in documents)
    assert most < path.stat().st_size / 2
    assert pa.parquet.read_metadata(path).num_row_groups == 1


def test_files_that_are_cut_off_or_no_arrow_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    for format_ in ("stream", "file"):
        content = write(path, texts_table(list(TEXTS)), format_).read_bytes()
        for size in (0, 3, 100, len(content) // 2, len(content) - 9):
            path.write_bytes(content[:size])
            assert str(path) in refusal(path)
    table = texts_table(list(TEXTS))
    sink = pa.BufferOutputStream()
    writer = pa.ipc.new_stream(sink, table.schema)
    writer.write_table(table)  # and never closed: the last message is whole
    path.write_bytes(sink.getvalue().to_pybytes())
    assert "does not end in the mark that closes an Arrow stream" in refusal(path)


def test_a_saved_dataset_is_read_in_its_own_order_without_what_it_does_not_list(tmp_path: Path) -> None:
    folder = save(datasets.Dataset(texts_table(list(TEXTS))), tmp_path / "set", num_shards=11)
    write(folder / "cache-1.arrow", texts_table(["left by map()"]))
    assert [document.text for document in read(folder)] == TEXTS
    state = json.loads((folder / "state.json").read_text())
    state["_data_files"].reverse()
    (folder / "state.json").write_text(json.dumps(state))
    expected = datasets.load_from_disk(folder)["text"][:]
    assert [document.text for document in read(folder)] == expected != TEXTS
    files = source_inputs("wiki", ArrowSource(kind="arrow", path=folder))
    assert [Path(file.path).name for file in files] == [file["filename"] for file in state["_data_files"]]


def test_of_a_saved_dataset_dict_the_named_split_is_read(tmp_path: Path) -> None:
    splits = {name: datasets.Dataset(texts_table([name] * 3)) for name in ("train", "test")}
    folder = save(datasets.DatasetDict(splits), tmp_path / "sets")
    key = "data.sources.wiki.split"
    assert [document.text for document in read(folder, split="test")] == ["test"] * 3
    assert f"{folder} holds the splits train, test, and no split is named: choose one with {key}" in refusal(folder)
    assert "and 'dev' is none of them" in refusal(folder, split="dev")
    assert f"holds one dataset and no splits: leave {key}=train out" in refusal(folder / "train", split="train")
    both = open_corpus("wiki", ArrowSource(kind="arrow", path=[folder / "test", folder / "train"]))
    assert [document.text for document in both.documents()] == ["test"] * 3 + ["train"] * 3, "a list of folders"
    assert "leads to files of several splits" in refusal(folder / "t*"), "a pattern of folders"
    assert f"holds {folder}/t" in refusal(tmp_path), "no two splits in silence"


def test_a_damaged_saved_dataset_is_refused(tmp_path: Path) -> None:
    folder = save(datasets.Dataset(texts_table(list(TEXTS))), tmp_path / "set", num_shards=2)
    state = json.loads((folder / "state.json").read_text())
    (folder / "data-00001-of-00002.arrow").unlink()
    assert "state.json lists data-00001-of-00002.arrow, which is missing" in refusal(folder)
    for content in ("{", "[]", "{}", '{"_data_files": 3}', '{"_data_files": [{"name": "x"}]}'):
        (folder / "state.json").write_text(content)
        assert f"{folder / 'state.json'} is not in the form of save_to_disk" in refusal(folder)
    (folder / "state.json").write_text(json.dumps(state | {"_indices_data_files": [{"filename": "indices.arrow"}]}))
    assert "selects rows by a table of indices" in refusal(folder)


def test_folders_of_parquet_and_arrow_need_not_come_from_datasets(tmp_path: Path) -> None:
    for name, kind in (("a.arrow", "stream"), ("b.feather", "file"), ("c.arrows", "stream"), ("notes.txt", "file")):
        write(tmp_path / name, texts_table([name]), kind)
    assert [document.text for document in read(tmp_path)] == ["a.arrow", "b.feather", "c.arrows"]


def test_a_saved_dataset_as_hub_source_is_refused_with_its_kind(tmp_path: Path) -> None:
    folder = save(datasets.Dataset(texts_table(list(TEXTS))), tmp_path / "set")
    with pytest.raises(DataError) as caught:
        open_corpus("wiki", HubSource(kind="hub", name=str(folder)))
    assert "was written by save_to_disk" in str(caught.value)
    assert f"give the source `kind: arrow` and `path: {folder}`" in str(caught.value)


def test_the_reader_needs_no_datasets(tmp_path: Path) -> None:
    folder = save(datasets.Dataset(texts_table(list(TEXTS))), tmp_path / "set")
    script = (
        "import sys\nfrom pathlib import Path\n"
        "from evenpack.data.sources.kinds import open_corpus\n"
        "from evenpack.data.sources.config import ArrowSource\n"
        "corpus = open_corpus('a', ArrowSource(kind='arrow', path=Path(sys.argv[1])))\n"
        "assert 'pyarrow' not in sys.modules\n"
        "print(len(list(corpus.documents())), 'datasets' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, folder], capture_output=True, text=True, check=True)
    assert done.stdout == "50 False\n"


def test_all_formats_of_one_corpus_are_prepared_to_the_same_bytes(
    tmp_path: Path, corpus: Path, small_batches: None
) -> None:
    texts = sentences(150, seed=2)
    write_jsonl(tmp_path / "1.jsonl", texts[:70])
    write_jsonl(tmp_path / "0.jsonl", texts[70:])
    table = texts_table(list(texts))
    write(tmp_path / "a.arrow", table, "file lz4", rows_in_batch=40)
    write(tmp_path / "a.parquet", table, "parquet", rows_in_batch=40)
    save(datasets.Dataset(table), tmp_path / "set", num_shards=3)
    sources = {
        "one": {"kind": "jsonl", "path": corpus / "code.jsonl"},
        "several": {"kind": "jsonl", "path": [tmp_path / "1.jsonl", tmp_path / "0*"]},
        "parquet": {"kind": "parquet", "path": tmp_path / "a.parquet"},
        "arrow": {"kind": "arrow", "path": tmp_path / "a.arrow"},
        "saved": {"kind": "arrow", "path": tmp_path / "set"},
    }
    found = {}
    for name, section in sources.items():
        directory = tmp_path / "prepared" / name
        recorder = Recorder()
        if name in ("several", "saved"):
            with pytest.raises(StoppedError):
                prepare(data_config({"wiki": section}), directory, progress=StopAfter(4))
        prepare(data_config({"wiki": section}), directory, progress=recorder)
        assert (recorder.states[0].bytes_resumed > 0) == (name in ("several", "saved"))
        assert recorder.states[-1].bytes_read == recorder.states[-1].total_bytes
        found[name] = {
            file: content for file, content in contents(directory / "sources").items() if "journal" not in file
        }
    assert "wiki/tokens.bin" in found["one"]
    assert [name for name in found if found[name] != found["one"]] == []


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow", "saved"])
def test_a_source_without_a_document_is_refused_and_nothing_is_left(tmp_path: Path, kind: str) -> None:
    write_jsonl(tmp_path / "a.jsonl", [])
    write(tmp_path / "a.parquet", texts_table([]), "parquet")
    write(tmp_path / "a.arrow", texts_table([]))
    if kind == "saved":
        save(datasets.Dataset(texts_table([])), tmp_path / "a.saved")
    section = {"kind": "arrow" if kind == "saved" else kind, "path": tmp_path / f"a.{kind}"}
    with pytest.raises(DataError, match="source 'wiki' holds no document"):
        prepare(data_config({"wiki": section}), tmp_path / "prepared")
    assert contents(tmp_path / "prepared") == {}
