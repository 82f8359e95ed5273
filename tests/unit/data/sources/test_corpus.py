"""Documents of every kind of source, and the messages for wrong sources."""

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest
import xxhash
from backports import zstd
from pydantic import TypeAdapter

from evenpack.data.sources.config import BuiltinSource, HubSource, JsonlSource, MegatronSource, Source, TextSource
from evenpack.data.sources.corpus import Document
from evenpack.data.sources.kinds import open_corpus, source_inputs
from evenpack.errors import DataError


def texts(documents: list[Document]) -> list[str]:
    return [document.text for document in documents]


def read(source: JsonlSource | TextSource | BuiltinSource | HubSource, start: int = 0) -> list[Document]:
    return list(open_corpus("wiki", source).documents(start))


def jsonl(path: Path, text_key: str = "text") -> JsonlSource:
    return JsonlSource(kind="jsonl", path=path, text_key=text_key)


def text(path: Path, separator: str) -> TextSource:
    return TextSource.model_validate({"kind": "text", "path": path, "document_separator": separator})


def write_jsonl(path: Path, values: list[str]) -> Path:
    return write_rows(path, [{"id": number, "text": value} for number, value in enumerate(values)])


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Writes jsonl or parquet, by the ending; groups of parquet have three rows."""
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=3)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def refusal(source: JsonlSource | TextSource | BuiltinSource | HubSource | MegatronSource) -> str:
    """Returns the error message of reading the whole source."""
    with pytest.raises(DataError) as caught:
        list(open_corpus("wiki", source).documents())
    return str(caught.value)


def test_each_line_of_jsonl_is_a_document_with_its_size_and_hash(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["one", "zwölf", ""])
    documents = read(jsonl(path))
    assert texts(documents) == ["one", "zwölf", ""]
    assert [document.text_bytes for document in documents] == [3, 6, 0]
    assert documents[1].identity == xxhash.xxh3_64_intdigest("zwölf".encode())
    assert documents[-1].bytes_read == path.stat().st_size == open_corpus("wiki", jsonl(path)).total_bytes


@pytest.mark.parametrize(
    ("suffix", "compress", "between"),
    [("gz", gzip.compress, b""), ("zst", zstd.compress, b"\x50\x2a\x4d\x18\x04\x00\x00\x00seek")],  # a skippable frame
)
def test_a_compressed_file_of_many_members_reads_like_the_plain_one(
    suffix: str, compress: Callable[[bytes], bytes], between: bytes, tmp_path: Path
) -> None:
    plain = write_jsonl(tmp_path / "plain.jsonl", [f"document {number} " * 50 for number in range(400)])
    content = plain.read_bytes()
    members = [compress(content[start : start + 5000]) for start in range(0, len(content), 5000)]
    packed = tmp_path / f"packed.jsonl.{suffix}"
    packed.write_bytes(between + between.join(members) + between)
    assert texts(read(jsonl(packed))) == texts(read(jsonl(plain)))
    assert read(jsonl(packed))[-1].bytes_read == packed.stat().st_size


def test_a_frame_with_a_window_of_two_gibibytes_can_be_read(tmp_path: Path) -> None:
    compressor = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 31})
    path = tmp_path / "long.jsonl.zst"
    path.write_bytes(compressor.compress(b'{"text": "far"}\n') + compressor.flush())
    assert texts(read(jsonl(path))) == ["far"]


@pytest.mark.parametrize("start", [0, 1, 3, 5, 9])
def test_documents_from_a_number_on_are_the_tail_of_all(tmp_path: Path, start: int) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["a", "b", "c"])
    write_jsonl(tmp_path / "b.jsonl", ["d", "e"])
    (tmp_path / "t.txt").write_text("a\nb\n\nc\n\n\nd\n\ne\n\nf\n")
    for source in (jsonl(tmp_path), text(tmp_path / "t.txt", "blank_line"), text(tmp_path / "t.txt", "line")):
        assert read(source, start) == read(source)[start:]


def test_documents_passed_over_are_not_parsed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('not JSON\n{"text": "fine"}\n')
    assert texts(read(jsonl(path), 1)) == ["fine"]


def test_text_is_separated_by_file_blank_line_or_line(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n \r\n\r\nthree\n")
    (tmp_path / "b.txt").write_text(" \n")
    assert texts(read(text(tmp_path, "file"))) == ["one\ntwo\n \n\nthree"]
    assert texts(read(text(tmp_path, "blank_line"))) == ["one\ntwo", "three"]
    assert texts(read(text(tmp_path, "line"))) == ["one", "two", "three"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1, 2]", "expected a JSON object, found list"),
        ('{"body": "x", "id": 1}', "no key 'text'; existing keys: 'body', 'id'"),
        ('{"text": 5}', "'text' must be a string, found int"),
        ("[" * 100_000, "not a readable JSON line"),
        ('{"text": ' + "9" * 5000 + "}", "not a readable JSON line"),
        ('{"text": "\\ud800"}', "half of a surrogate pair at character 0"),
        ('{"text": "a", "more": {"id": 1}, "text": "b"}', "the key 'text' occurs twice"),
    ],
)
def test_a_wrong_line_is_named_with_file_number_and_reason(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    found = refusal(jsonl(path))
    assert f"{path}, line 2: " in found
    assert message in found


def test_a_key_may_occur_again_in_another_object_or_as_a_value(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"key": "text", "text": "a", "meta": {"text": "b", "text": "c"}}\n')
    assert [document.text for document in open_corpus("web", jsonl(path)).documents()] == ["a"]


def test_utf16_without_a_mark_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("one\ntwo".encode("utf-16-le"))
    assert f"{path}, line 1: character 2 is NUL" in refusal(TextSource(kind="text", path=path))


@pytest.mark.parametrize("suffix", ["", ".zst", ".gz"])
def test_invalid_utf8_is_named_with_line_and_byte(tmp_path: Path, suffix: str) -> None:
    first = '{"text": "fünf"}\n'.encode()
    content = first + b'{"text": "\xff"}\n'
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes({"": bytes, ".zst": zstd.compress, ".gz": gzip.compress}[suffix](content))
    found = refusal(jsonl(path))
    assert f"{path}, line 2: invalid UTF-8: byte 0xff at byte {len(first) + 10} of the" in found
    assert ("uncompressed" in found) == bool(suffix)


@pytest.mark.parametrize(
    ("suffix", "compress", "damage", "message"),
    [
        ("gz", gzip.compress, lambda whole: whole[:-8] + b"\0" * 8, "is not readable gzip: CRC check failed"),
        ("gz", gzip.compress, lambda whole: whole[:20] + b"\xff" * 20 + whole[40:], "is not readable gzip"),
        ("zst", zstd.compress, lambda _whole: b"this is not zstd at all", "is not readable zstd"),
    ],
)
def test_a_compressed_file_that_is_cut_off_or_damaged_is_refused(
    suffix: str, compress: Callable[[bytes], bytes], damage: Callable[[bytes], bytes], message: str, tmp_path: Path
) -> None:
    path = tmp_path / f"a.jsonl.{suffix}"
    whole = compress(b'{"text": "one"}\n' * 1000)
    path.write_bytes(whole + whole[: len(whole) // 2])
    assert f"{path} ends in the middle of its compressed data: it is truncated" in refusal(jsonl(path))
    path.write_bytes(damage(whole))
    assert f"{path} {message}" in refusal(jsonl(path))


def too_long(folder: Path) -> dict[str, tuple[dict[str, object], str]]:
    """Writes files with a text of 900 bytes and one of more than 1,000; returns sections, and where that is."""
    texts = ["a" * 900, "b" * 1001]
    lines = "".join(f"{json.dumps({'text': text})}\n" for text in texts).encode()
    paragraph = b"c" * 499 + b"\n"
    (folder / "a.jsonl").write_bytes(lines)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    (folder / "a.jsonl.zst").write_bytes(zstd.compress(lines))
    (folder / "line.txt").write_bytes(b"a" * 900 + b"\n" + b"b" * 1001 + b"\n")
    (folder / "paragraph.txt").write_bytes(paragraph * 2 + b"\n" + paragraph * 3)
    (folder / "hub").mkdir()
    (folder / "hub" / "train.jsonl").write_bytes(lines)
    column = pa.array(texts)
    kinds = {"plain": column, "large": column.cast(pa.large_string()), "encoded": column.dictionary_encode()}
    for name, values in kinds.items():
        table = pa.table({"text": values})
        pyarrow.parquet.write_table(table, folder / f"{name}.parquet")
    text = {"kind": "text", "path": "line.txt"}
    return {
        **{f"jsonl{suffix}": ({"kind": "jsonl", "path": f"a.jsonl{suffix}"}, f"a.jsonl{suffix}, line 2: a line")
           for suffix in ("", ".gz", ".zst")},
        "line": (text | {"document_separator": "line"}, "line.txt, line 2: a line"),
        "row": (text | {"rows": "lines"}, "line.txt, line 2: a line"),
        "paragraph": (text | {"path": "paragraph.txt", "document_separator": "blank_line"}, "line 6: a document"),
        "file": (text | {"path": "paragraph.txt"}, "paragraph.txt, line 3: a document"),
        **{name: ({"kind": "parquet", "path": f"{name}.parquet"}, f"{name}.parquet, row 1 (from 0): a text")
           for name in kinds},
        "hub": ({"kind": "hub", "name": "hub"}, "row 1 of hub: a text"),
    }  # fmt: skip


def test_a_document_that_is_too_long_is_named_by_its_place_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    for case, (section, where) in too_long(tmp_path).items():
        limited, enough = (
            TypeAdapter(Source).validate_python(section | {"maximum_document_bytes": most}) for most in (1000, "3KB")
        )
        assert len(read(enough)) == (1 if case == "file" else 2), case
        message = refusal(limited)
        assert f"{where} of more than 1,000 bytes" in message, case
        assert "data.sources.NAME.maximum_document_bytes allows longer ones" in message


@pytest.mark.slow
def test_a_file_is_read_in_bounded_memory_whatever_it_holds(tmp_path: Path) -> None:
    """A line of 1 GiB is 32 kB of zstd; a file of 256 MB has rows of 2 bytes."""
    compressor = zstd.ZstdCompressor(level=19)
    with (tmp_path / "bomb.jsonl.zst").open("wb") as bomb:
        for _ in range(1024):
            bomb.write(compressor.compress(b"a" * (1 << 20)))
        bomb.write(compressor.flush())
    with gzip.open(tmp_path / "bomb.jsonl.gz", "wb", compresslevel=1) as bomb:
        for _ in range(256):
            bomb.write(b"a" * (1 << 20))
    with (tmp_path / "bomb.txt").open("wb") as file:
        file.truncate(1 << 30)
    script = (
        "import resource, sys; from evenpack.data.sources.config import *; from evenpack.errors import DataError\n"
        "from evenpack.data.sources.kinds import open_corpus\n"
        "now = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (now + (300 << 20), -1))\n"
        "for kind, path in zip(('jsonl', 'jsonl', 'text'), sys.argv[1:]):\n"
        "    section = {'jsonl': JsonlSource, 'text': TextSource}[kind](kind=kind, path=path)\n"
        "    corpus = open_corpus('wiki', section)\n"
        "    for documents in (corpus.documents, corpus.parts(1 << 20)[0].documents):\n"
        "        try: print(next(documents()))\n"
        "        except DataError as error: print(error)\n"
    )
    paths = [tmp_path / f"bomb.{name}" for name in ("jsonl.zst", "jsonl.gz", "txt")]
    done = subprocess.run([sys.executable, "-c", script, *paths], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    expected = [f"{path}, line 1: a line of more than 67,108,864 bytes" for path in paths for _ in range(2)]
    assert [line.partition(". ")[0] for line in done.stdout.splitlines()] == expected


def test_a_source_without_a_usable_path_names_the_override(tmp_path: Path) -> None:
    override = "data.sources.wiki.path=FILE"
    assert override in refusal(JsonlSource(kind="jsonl"))
    assert override in refusal(jsonl(tmp_path / "missing.jsonl"))
    (tmp_path / "a.txt").write_text("text")
    assert "holds no *.jsonl or *.jsonl.zst or *.jsonl.gz" in refusal(jsonl(tmp_path))
    assert "holds no text" in refusal(MegatronSource(kind="megatron"))


@pytest.mark.slow
def test_the_builtin_corpus_is_the_same_in_every_process_and_has_no_duplicates() -> None:
    script = (
        "import sys\n"
        "from evenpack.data.sources.kinds import open_corpus\n"
        "from evenpack.data.sources.config import BuiltinSource\n"
        "tail = list(open_corpus('b', BuiltinSource(kind='builtin')).documents(100))\n"
        "assert not {'pydoc_data.topics', 'this', 'antigravity', 'turtle'} & set(sys.modules)\n"
        "print([document.identity for document in tail], tail[-1].bytes_read)\n"
    )
    documents = read(BuiltinSource(kind="builtin"))
    identities = [document.identity for document in documents]
    assert len(set(identities)) == len(documents) > 1550
    assert sum(document.text_bytes for document in documents) > 1_500_000
    assert min(map(len, texts(documents))) >= 30
    other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert other.stdout == f"{identities[100:]} {documents[-1].bytes_read}\n"


@pytest.mark.parametrize(("kind", "key"), [("jsonl", "Split"), ("parquet", "partition")])
@pytest.mark.parametrize("files", [1, 2])
def test_rows_of_several_splits_are_refused_by_whichever_part_reads_others(
    kind: str, key: str, files: int, tmp_path: Path
) -> None:
    tables = [[{key: split, "text": f"{split} {number}"} for number in range(3)] for split in ("train", "test")]
    for number, rows in enumerate(tables if files == 2 else [tables[0] + tables[1]]):
        write_rows(tmp_path / f"{number}.{kind}", rows)
    source: Any = TypeAdapter(Source).validate_python({"kind": kind, "path": tmp_path})
    first, *others = open_corpus("wiki", source).parts(100)
    assert {document.text[:5] for document in first.documents()} == {"train"}
    with pytest.raises(DataError, match=f"'{key}' is 'test', and other rows say 'train'"):
        list(others[-1].documents())


@pytest.mark.parametrize("outer", ["meta", "metadata"])
def test_rows_whose_metadata_say_several_splits_are_refused(outer: str, tmp_path: Path) -> None:
    rows = [{outer: {"split": split, "language": split}, "text": split} for split in ("train", "train", "test")]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    with pytest.raises(DataError, match=rf"line 3: '{outer}\.split' is 'test', and other rows say 'train'"):
        read(jsonl(path))
    rows[2][outer] = {"language": "test"}
    assert len(read(jsonl(write_rows(path, rows)))) == 3


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "hub"])
@pytest.mark.parametrize(
    ("key", "said", "is_refused"),
    [
        ("data_split", ["train", None, "training", "test"], True),
        ("data_split", ["dev", "dev", "train", "train"], True),
        ("data_split", ["train", "wiki", "train", "7"], False),
        ("data_split", ["test", "validation", "test", "wiki"], False),
        ("partition", ["training manuals", "unseen texts", "train"], False),
    ],
)
def test_rows_that_say_other_splits_are_refused(
    kind: str, key: str, said: list[str | None], *, is_refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [{key: split, "text": f"{number}"} for number, split in enumerate(said)]
    (tmp_path / "set").mkdir()
    path = write_rows(tmp_path / "set" / f"rows.{'jsonl' if kind == 'hub' else kind}", rows)
    place = {"name": str(path.parent)} if kind == "hub" else {"path": path}
    source: Any = TypeAdapter(Source).validate_python({"kind": kind} | place)
    if is_refused:
        message = refusal(source)
        assert f"'{key}' is {said[-1]!r}, and other rows say {said[0]!r}" in message
        assert ("rows.jsonl, line" in message) == (kind == "jsonl")
    else:
        assert texts(read(source)) == [row["text"] for row in rows]


@pytest.mark.parametrize(
    ("files", "keys", "expected"),
    [
        (["data", "holdout"], {}, "warned"),
        (["data", "holdout"], {"split": "train[:50%]"}, "warned"),
        (["a/data", "held_out/data"], {}, "warned"),
        (["train", "train_test"], {}, "refused"),
        (["train", "test"], {}, "silent"),
        (["train", "dev"], {"split": "validation"}, "silent"),
        (["train", "train_dev"], {"validation_split": "validation"}, "refused"),
        (["train", "dev"], {"validation_split": "validation"}, "silent"),
        (["data", "other"], {}, "silent"),
    ],
)
def test_files_that_datasets_puts_into_one_split_are_looked_at(
    files: list[str],
    keys: dict[str, str],
    expected: str,
    *,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for file in files:
        (tmp_path / "set" / file).parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(tmp_path / "set" / f"{file}.jsonl", [file])
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    source = HubSource(kind="hub", name="set", **keys)
    if expected == "refused":
        message = refusal(source)
        assert "leads to files of several splits" in message
        assert "in data.sources.wiki.path of kind jsonl, parquet or text" in message
        assert f"{files[1]}.jsonl" in message
    else:
        open_corpus("NAME", source)
    assert ("whose names say that they are held out" in caplog.text) == (expected == "warned")


def test_files_of_a_name_on_the_hub_are_looked_at_below_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def load_dataset_builder(name: str, subset: str | None) -> SimpleNamespace:
        base = f"hf://datasets/{name}@0123abcd"
        files = {"train": [f"{base}/data/a.parquet", f"{base}/held_out/a.parquet"], "test": [f"{base}/test.parquet"]}
        return SimpleNamespace(
            download_and_prepare=lambda: None,
            as_dataset=lambda split: datasets.Dataset.from_dict({"text": [split]}),
            base_path=base,
            config=SimpleNamespace(data_files=files),
        )

    monkeypatch.setattr("datasets.load_dataset_builder", load_dataset_builder)
    open_corpus("wiki", HubSource(kind="hub", name="somebody/test_of_nothing", split="test"))
    assert not caplog.text
    open_corpus("wiki", HubSource(kind="hub", name="somebody/wiki"))
    assert "source 'wiki' trains on hf:/datasets/somebody/wiki@0123abcd/held_out/a.parquet, whose" in caplog.text


def test_a_local_folder_is_read_through_datasets_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    write_jsonl(folder / "train.jsonl", [f"row {number}" for number in range(2500)])
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    source = HubSource(kind="hub", name=str(folder))
    assert texts(read(source)) == [f"row {number}" for number in range(2500)]
    assert texts(read(source, 2499)) == ["row 2499"]
    assert read(source, 2499)[0].bytes_read == open_corpus("wiki", source).total_bytes > 2500 * len("row 1")
    assert read(source, 2500) == []
    assert capfd.readouterr() == ("", "")
    assert [Path(file.path).name for file in source_inputs("wiki", source)] == ["train.jsonl"]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert texts(read(source.model_copy(update={"name": "~/set"}), 2499)) == ["row 2499"]
    assert "no column 'body'; existing columns: id, text" in refusal(source.model_copy(update={"text_key": "body"}))
    assert "must be a string, found int" in refusal(source.model_copy(update={"text_key": "id"}))
    assert "split='test') failed" in refusal(source.model_copy(update={"split": "test"}))
