"""The files of a source's path: files, folders, patterns and lists of them, in one order."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from prepared_files import data_config
from pydantic import TypeAdapter, ValidationError

from evenpack.config import validate
from evenpack.data.manifest import data_section
from evenpack.data.sources.config import Hdf5Source, HubSource, JsonlSource, Source
from evenpack.data.sources.kinds import open_corpus, source_inputs
from evenpack.data.sources.without_text import shards_of
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


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow", "text", "hdf5"])
def test_every_kind_of_file_takes_a_list(kind: str) -> None:
    source = TypeAdapter(Source).validate_python({"kind": kind, "path": ["a", "b"]})
    assert source.path == (Path("a"), Path("b"))
    assert type(source).model_validate_json(source.model_dump_json()) == source


def test_a_token_file_has_one_prefix() -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(Source).validate_python({"kind": "megatron", "path": ["a", "b"]})


def test_both_sets_of_shards_may_be_lists(tmp_path: Path) -> None:
    files = [tmp_path / f"{name}.hdf5" for name in "cabd"]
    for file in files:
        file.write_bytes(b"")
    source = Hdf5Source(kind="hdf5", path=tuple(files[:2]), validation_path=tuple(files[2:]))
    found = shards_of("wiki", source)
    assert (found.training, found.validation) == (tuple(files[:2]), tuple(files[2:]))
