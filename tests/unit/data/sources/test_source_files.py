"""The files of a source's path: files, folders, patterns and lists of them, in one order."""

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from prepared_files import data_config
from pydantic import TypeAdapter

from evenpack.config import validate
from evenpack.data.manifest import data_section
from evenpack.data.sources.config import HubSource, JsonlSource, Source, TextSource
from evenpack.data.sources.kinds import open_corpus, source_inputs
from evenpack.errors import ConfigError, DataError


@pytest.fixture
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Writes a working directory of files whose one document is their name."""
    for name in ("b/2.jsonl", "b/10.jsonl", "a/x.jsonl", "a/sub/y.jsonl", "c.jsonl", ".hidden/h.jsonl", "a/.z.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"text": name}) + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def jsonl(path: Any) -> JsonlSource:
    return JsonlSource.model_validate({"kind": "jsonl", "path": path})


def names(path: Any) -> list[str]:
    documents = list(open_corpus("wiki", jsonl(path)).documents())
    files = source_inputs("wiki", jsonl(path))
    assert [Path(file.path).name for file in files] == [Path(document.text).name for document in documents]
    assert documents[-1].bytes_read == sum(file.bytes for file in files)
    return [document.text for document in documents]


def refusal(path: Any) -> str:
    with pytest.raises(DataError) as caught:
        open_corpus("wiki", jsonl(path))
    return str(caught.value)


@pytest.mark.parametrize(("path", "expected"), [
    ("c.jsonl", ["c.jsonl"]),
    (["c.jsonl"], ["c.jsonl"]),
    ("a", ["a/sub/y.jsonl", "a/x.jsonl"]),
    ("b/*", ["b/10.jsonl", "b/2.jsonl"]),
    ("[ab]/*.jsonl", ["a/x.jsonl", "b/10.jsonl", "b/2.jsonl"]),
    ("**/*.jsonl", ["a/sub/y.jsonl", "a/x.jsonl", "b/10.jsonl", "b/2.jsonl", "c.jsonl"]),
    (".hidden/*.jsonl", [".hidden/h.jsonl"]),
    (["c.jsonl", "b/*.jsonl", "a"], ["c.jsonl", "b/10.jsonl", "b/2.jsonl", "a/sub/y.jsonl", "a/x.jsonl"]),
    (["b/2.jsonl", "a/x.jsonl", "b/10.jsonl"], ["b/2.jsonl", "a/x.jsonl", "b/10.jsonl"]),
])  # fmt: skip
def test_a_list_keeps_its_order_and_a_folder_or_pattern_is_sorted(shards: Path, path: Any, expected: list[str]) -> None:
    assert names(path) == expected
    absolute = [str(shards / one) for one in path] if isinstance(path, list) else str(shards / path)
    assert names(absolute) == expected


def test_a_file_named_twice_is_refused_with_both_of_its_names(shards: Path) -> None:
    message = refusal(["b/*.jsonl", "c.jsonl", "b/2.jsonl"])
    assert "source 'wiki' leads to b/2.jsonl twice (by b/*.jsonl and by b/2.jsonl)" in message
    assert "leave one out of data.sources.wiki.path" in message
    (shards / "b" / "3.jsonl").symlink_to(shards / "c.jsonl")
    assert "leads to c.jsonl and b/3.jsonl, which are the same file" in refusal(["c.jsonl", "b"])
    (shards / "b" / "4.jsonl").symlink_to(shards / "c.jsonl")
    assert "which are the same file (by b): leave one out" in refusal("b")
    hub = HubSource(kind="hub", name=str(shards / "b"))
    assert len(source_inputs("wiki", hub)) == 4, (
        "the hub's own cache links equal files to one; only `datasets` reads it"
    )


@pytest.mark.parametrize(("path", "expected"), [
    (["c.jsonl", "b/*.json"], "source 'wiki': b/*.json does not exist, and no file matches it"),
    (["c.jsonl", "d.jsonl"], "source 'wiki': d.jsonl does not exist"),
    ("b/**.jsonl", "b/**.jsonl is not a glob pattern"),
    ("pipe", "pipe is neither a file nor a folder"),
])  # fmt: skip
def test_a_path_that_leads_to_no_file_is_named(shards: Path, path: Any, expected: str) -> None:
    os.mkfifo("pipe")
    assert expected in refusal(path)


@pytest.mark.parametrize(("path", "expected"), [
    ([], "found an empty list"),
    ([["a"]], "expected a path or a list of paths, found ['a']"),
    ([None], "expected a path or a list of paths, found None"),
    (5, "expected a path or a list of paths, found 5"),
    (["a", ""], "expected a path, found ''"),
])  # fmt: skip
def test_what_is_no_path_is_refused_with_its_key(path: Any, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate({"kind": "jsonl", "path": path}, JsonlSource, origin="run.yaml")
    assert str(caught.value).startswith("run.yaml:\n  path: ")
    assert expected in str(caught.value)


def test_a_list_of_one_path_is_that_path_in_the_data_section(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(shards))
    sections = [data_section(data_config({"wiki": {"kind": "jsonl", "path": path}})) for path in ("a", ["~/a"])]
    assert sections[0] == sections[1]
    assert sections[0]["sources"]["wiki"]["path"] == str(shards / "a"), "as before there were lists"
    several = data_section(data_config({"wiki": {"kind": "jsonl", "path": ["b", "a"]}}))
    assert several["sources"]["wiki"]["path"] == [str(shards / "b"), str(shards / "a")]


def test_how_long_a_document_may_be_is_no_part_of_the_data_section() -> None:
    """Data that was prepared before there was a limit, or with another one, stays valid."""
    for keys in ({"kind": "jsonl", "path": "a"}, {"kind": "hub", "name": "a"}):
        before, now = (data_section(data_config({"wiki": keys | more})) for more in ({}, {"maximum_document_bytes": 9}))
        assert before == now
        assert "maximum_document_bytes" not in before["sources"]["wiki"]


SPLITS: dict[str, tuple[list[str], str]] = {
    "files": (["test.jsonl", "train.jsonl", "validation.jsonl"], "refused"),
    "shards": (
        ["train-00000-of-00002.jsonl.zst", "train-00001-of-00002.jsonl.zst", "dev-00000-of-00001.jsonl"],
        "refused",
    ),
    "dots": (["c4-train.00000-of-01024.json.gz.jsonl", "c4-valid.00000-of-00008.json.gz.jsonl"], "refused"),
    "ends of names": (["wiki_en_2024_full_train.jsonl", "other_test.jsonl"], "refused"),
    "middles": (["en_train_2.jsonl", "en_test_2.jsonl"], "refused"),
    "other words": (["Training.jsonl", "testset.jsonl"], "refused"),
    "held out": (["train1.jsonl", "held_out.jsonl"], "refused"),
    "folders": (["en/train/a.jsonl", "en/eval/a.jsonl"], "refused"),
    "folders of data": (["train_data/a.jsonl", "test_data/a.jsonl"], "refused"),
    "a folder and its files": (["train/test_1.jsonl", "train/0.jsonl"], "refused"),
    "a folder of one split and its files": (["train/test_1.jsonl", "train/test_2.jsonl"], "warned"),
    "both in a name": (["train.jsonl", "train_test.jsonl"], "refused"),
    "camel case": (["wikiTrain.jsonl", "wikiTest2.jsonl"], "refused"),
    "five words": (["wiki_en_train_2020_clean_v2.jsonl", "wiki_en_test_2020_clean_v2.jsonl"], "refused"),
    **{
        word: (["train.jsonl", f"{word}.jsonl"], "refused")
        for word in ("tests", "evals", "validate", "testA", "testb", "unseen", "valid_seen", "hold-out", "newstest2014")
    },
    "held out beside others": (["a.jsonl", "b.jsonl", "val.jsonl"], "warned"),
    "held out alone": (["test-0.jsonl", "test-1.jsonl", "dev.jsonl"], "warned"),
    "held out by another word": (["quiz.jsonl", "train-0.jsonl", "train-1.jsonl"], "warned"),
    "one split": (["train-0.jsonl", "train-1.jsonl"], "silent"),
    "titles": (["how_to_train_a_dog.jsonl", "what_a_test_is_for.jsonl", "contest.jsonl", "restrain.jsonl"], "silent"),
}


def test_an_ending_may_be_the_split(tmp_path: Path) -> None:
    for name in ("news.train", "news.testa"):
        (tmp_path / name).write_text(name)
    source = TextSource.model_validate({"kind": "text", "path": tmp_path})
    with pytest.raises(DataError, match=r"news\.train"):
        source_inputs("news", source)


@pytest.mark.parametrize("form", ["folder", "pattern", "validation_path"])
@pytest.mark.parametrize(("files", "expected"), SPLITS.values(), ids=SPLITS)
def test_splits_are_never_mixed_silently(
    files: list[str], expected: str, form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "corpus"
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps({"text": name}) + "\n")
    path: Any = folder / "**" / "*.jsonl*" if form == "pattern" else folder
    (tmp_path / "own.jsonl").touch()
    section = {"path": path} if form != "validation_path" else {"path": tmp_path / "own.jsonl", "validation_path": path}
    source = JsonlSource.model_validate({"kind": "jsonl"} | section)
    if expected == "refused":
        with pytest.raises(DataError, match=r"leads to files of several splits, .*: name one split, by") as caught:
            open_corpus("wiki", source)
        assert all(name in str(caught.value) for name in (Path(files[0]).name, Path(files[-1]).name))
    else:
        with caplog.at_level(logging.WARNING):
            open_corpus("wiki", source)
            source_inputs("wiki", source)
        warned = [record for record in caplog.records if "held out" in record.message]
        assert len(warned) == (expected == "warned" and form != "validation_path")


@pytest.mark.parametrize(
    "path", [["corpus/train.jsonl", "corpus/test.jsonl"], "corpus/test*", ["corpus/tr*", "corpus/te*t.jsonl"]]
)
def test_splits_that_are_named_are_read(shards: Path, path: Any, caplog: pytest.LogCaptureFixture) -> None:
    (shards / "corpus").mkdir()
    for name in ("train", "test"):
        (shards / f"corpus/{name}.jsonl").write_text(json.dumps({"text": name}) + "\n")
    documents = [document.text for document in open_corpus("wiki", jsonl(path)).documents()]
    assert set(documents) == ({"test"} if path == "corpus/test*" else {"train", "test"})
    assert ("held out" in caplog.text) == ("corpus/te*t.jsonl" in path)


@pytest.mark.parametrize(
    ("kind", "files", "message"),
    [
        ("jsonl", ["a.jsonl", "a.jsonl.zst"], "of which one is the other compressed"),
        ("text", ["b/a.txt.gz", "b/a.txt"], "of which one is the other compressed"),
        ("jsonl", ["a.jsonl", "a (1).jsonl"], "of which one is a copy of the other, by their names and sizes"),
        ("text", ["b/Copy of a.txt.gz", "b/a.txt.gz"], "of which one is a copy of the other, by their names and sizes"),
        ("parquet", ["wiki.en.parquet", "wiki.en - Copy.parquet"], "of which one is a copy of the other"),
    ],
)
def test_copies_of_files_are_not_read_beside_them(kind: str, files: list[str], message: str, tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    adapter = TypeAdapter[Any](Source)
    for path in (tmp_path, tmp_path / "**" / "*"):
        with pytest.raises(DataError, match=message) as caught:
            source_inputs("wiki", adapter.validate_python({"kind": kind, "path": path}))
        assert Path(files[1]).name in str(caught.value)
    for name in (files[1:], files):  # named one by one
        named = [tmp_path / one for one in name]
        assert len(source_inputs("wiki", adapter.validate_python({"kind": kind, "path": named}))) == len(name)


def test_files_that_are_named_like_copies_and_are_none_are_read(tmp_path: Path) -> None:
    for name, text in (("a", "one"), ("a (1)", "another"), ("part (1)", "one"), ("part (2)", "two"), ("copy 2", "two")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": text}) + "\n")
    assert len(source_inputs("wiki", jsonl(tmp_path))) == 5


@pytest.mark.parametrize("other", ["more.ndjson", "more.JSONL", "more.jsonl.bz2", "more.json.gz", "linked"])
def test_data_that_is_passed_over_is_named(
    other: str, shards: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    corpus = shards / "corpus"
    corpus.mkdir()
    (corpus / "c.jsonl").write_text(json.dumps({"text": "c.jsonl"}) + "\n")
    (corpus / "README.md").touch()
    (corpus / "dataset_info.json").touch()
    assert names("corpus") == ["c.jsonl"]
    assert not caplog.text
    if other == "linked":
        (corpus / other).symlink_to(shards / "a")
    else:
        (corpus / other).touch()
    assert names("corpus") == ["c.jsonl"]
    assert f"source 'wiki' does not read corpus/{other} in corpus" in caplog.text
    caplog.clear()
    assert names("corpus/*.jsonl") == ["c.jsonl"], "a pattern chooses"
    assert not caplog.text


@pytest.mark.parametrize("kept", ["_delta_log/0.json", "_temporary/0/c.jsonl", ".hoodie/x", "metadata/1.metadata.json"])
def test_a_table_whose_files_do_not_all_count_is_refused(kept: str, shards: Path) -> None:
    (shards / "b" / kept).parent.mkdir(parents=True)
    (shards / "b" / kept).touch()
    with pytest.raises(DataError, match="is a table of which some files were replaced or are not finished"):
        names("b")
    assert names(["b/2.jsonl", "b/10.jsonl"]) == ["b/2.jsonl", "b/10.jsonl"]


def test_two_names_of_one_file_are_one_file(shards: Path) -> None:
    (shards / "b" / "3.jsonl").hardlink_to(shards / "b" / "2.jsonl")
    with pytest.raises(DataError, match=r"leads to b/2.jsonl and b/3.jsonl, which are the same file"):
        names("b")
    source = JsonlSource.model_validate({"kind": "jsonl", "path": "b/2.jsonl", "validation_path": "b/3.jsonl"})
    with pytest.raises(DataError, match="belongs to path and to validation_path"):
        open_corpus("wiki", source)


@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_a_pointer_of_git_lfs_is_no_text(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 12345\n")
    source: Any = TypeAdapter(Source).validate_python({"kind": kind, "path": str(path)})
    with pytest.raises(DataError, match=r"is a pointer of Git LFS.*git lfs pull"):
        list(open_corpus("wiki", source).documents())


def test_every_kind_of_files_looks_at_splits(tmp_path: Path) -> None:
    from evenpack.data.sources.kinds import KINDS

    for kind, ending in {"jsonl": "jsonl", "text": "txt", "parquet": "parquet", "hdf5": "hdf5"}.items():
        for split in ("train", "test"):
            (tmp_path / kind / split).mkdir(parents=True)
            (tmp_path / kind / split / f"0.{ending}").touch()
        source: Any = TypeAdapter(Source).validate_python({"kind": kind, "path": str(tmp_path / kind)})
        with pytest.raises(DataError, match="leads to files of several splits"):
            KINDS[kind].inputs("wiki", source)
