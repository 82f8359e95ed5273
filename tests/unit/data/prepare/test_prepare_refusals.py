"""`prepare` with wrong sources, concurrent calls and full disks leaves no half-written files."""

import json
import os
import shutil
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from prepared_files import (
    Recorder,
    ShownState,
    StopAfter,
    StoppedError,
    contents,
    data_config,
    recorded,
    save_tokenizer,
    save_words,
    two_sources,
    write_jsonl,
)

from evenpack.data.prepare.prepare import prepare
from evenpack.data.prepare.workers import LocalWorkers
from evenpack.errors import DataError, EvenpackError, PackingError


@pytest.mark.parametrize("already_there", [False, True])
def test_a_wrong_line_leaves_nothing_of_its_source(own_corpus: Path, tmp_path: Path, already_there: bool) -> None:
    directory = tmp_path / "deep" / "data"
    if already_there:
        directory.mkdir(parents=True)
    with (own_corpus / "wiki.jsonl").open("a") as file:
        file.write("broken\n")
    with pytest.raises(DataError, match=r"wiki\.jsonl, line 452: not a readable JSON line"):
        prepare(two_sources(own_corpus), directory)
    assert not directory.exists() or not any(directory.iterdir())


def test_finished_sources_stay_when_a_later_one_is_wrong(own_corpus: Path, tmp_path: Path, small_batches: None) -> None:
    directory = tmp_path / "data"
    config = two_sources(own_corpus, tokenizer=save_tokenizer(tmp_path / "tokenizer"))
    whole = (own_corpus / "code.jsonl").read_text()
    (own_corpus / "code.jsonl").write_text(whole + '{"body": "x"}\n')
    with pytest.raises(DataError, match=r"code\.jsonl, line 151: no key 'text'; existing keys: 'body'"):
        prepare(config, directory)
    assert sorted(path.name for path in (directory / "sources").iterdir()) == ["wiki"]
    (own_corpus / "code.jsonl").write_text(whole)
    recorder = recorded(config, directory)
    first = recorder.states[0]
    assert first.source == "wiki"
    assert first.bytes_resumed == first.total_bytes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "source 'wiki' holds no document"),
        ('{"text": ""}\n{"text": ""}\n', "encodes to nothing but unknown tokens, or to no token at all"),
        ('{"text": "\\u6f22\\u5b57"}\n', "encodes to nothing but unknown tokens, or to no token at all"),
        ('{"text": "cat"}\n', "leaves no sequence to train on"),
    ],
)
def test_a_source_without_content_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "wiki.jsonl").write_text(text)
    config = data_config(
        {"wiki": {"kind": "jsonl", "path": tmp_path / "wiki.jsonl"}},
        tokenizer=save_words(tmp_path / "words"),
        recipe={"kind": "documents", "max_sequence_length": 64, "minimum_document_length": 3},
    )
    with pytest.raises(DataError, match=message):
        prepare(config, tmp_path / "data")
    assert not (tmp_path / "data" / "manifest.json").exists()
    assert (tmp_path / "data").exists() == ("train" in message)


@pytest.mark.parametrize("workers", [None, LocalWorkers(2)])
def test_a_text_that_holds_the_end_of_documents_is_named_with_its_place(
    tmp_path: Path, workers: LocalWorkers | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evenpack.data.prepare.source.SMALLEST_PART_BYTES", 100)
    texts = [f"cat {'cat ' * number}" for number in range(40)]
    texts[29] = "cat | cat"
    source = {"kind": "jsonl", "path": write_jsonl(tmp_path / "wiki.jsonl", texts)}
    config = data_config({"wiki": source}, tokenizer=save_words(tmp_path / "words", end="|"))
    message = r"wiki\.jsonl, line 30: the tokenizer makes its special token '\|' of the text .*'cat \| cat'"
    with pytest.raises(DataError, match=message):
        prepare(config, tmp_path / "data", workers=workers)


def test_what_can_be_known_before_is_refused_before_anything_is_made(corpus: Path, tmp_path: Path) -> None:
    directory = tmp_path / "data"
    missing = {"wiki": {"kind": "jsonl", "path": tmp_path / "missing.jsonl"}}
    with pytest.raises(DataError, match=r"data\.sources\.wiki\.path=FILE"):
        prepare(data_config(missing), directory)
    with pytest.raises(DataError, match="tokenizer folder"):
        prepare(two_sources(corpus, tokenizer={"kind": "gpt2", "path": tmp_path / "nowhere"}), directory)
    with pytest.raises(PackingError, match="did you mean 'longest_pack_first'"):
        prepare(two_sources(corpus, packing={"algorithm": "longest_pack"}), directory)
    splits = {name: {"kind": "jsonl", "path": corpus / "wiki.jsonl", "weight": 1} for name in ("train", "test")}
    with pytest.raises(DataError, match=r"are of the splits train, test, and each source is trained on: leave"):
        prepare(data_config(splits), directory)
    assert not directory.exists()


@pytest.mark.parametrize("name", ["thesis", "manifest.json"])
def test_a_folder_with_what_is_not_its_own_is_not_prepared(name: str, corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "data" / name).mkdir(parents=True)
    with pytest.raises(DataError, match=rf"'{name}' first of 1"):
        prepare(two_sources(corpus), tmp_path / "data")
    assert [path.name for path in (tmp_path / "data").iterdir()] == [name]


def test_a_source_name_that_no_folder_can_have_is_refused_by_its_length() -> None:
    for name in ("w" * 300, "维" * 100):
        with pytest.raises(ValueError, match="has 300 bytes in UTF-8, but folders are named after it"):
            data_config({name: {"kind": "builtin"}})
    data_config({"维" * 66: {"kind": "builtin"}})


def test_no_thread_outlives_a_call_that_failed(own_corpus: Path, tmp_path: Path, small_batches: None) -> None:
    def workers() -> set[str]:
        return {thread.name for thread in threading.enumerate() if thread.name.startswith(("reader", "encoder"))}

    with pytest.raises(StoppedError) as stopped:
        prepare(two_sources(own_corpus), tmp_path / "data", progress=StopAfter(2))
    assert workers() == set(), f"while the frames of {stopped.value!r} live"
    (own_corpus / "wiki.jsonl").write_text("broken\n")
    with pytest.raises(DataError) as broken:
        prepare(two_sources(own_corpus), tmp_path / "broken")
    assert workers() == set(), f"while the frames of {broken.value!r} live"


def test_a_second_call_at_the_same_time_is_reported(corpus: Path, tmp_path: Path) -> None:
    config, directory = two_sources(corpus), tmp_path / "data"
    refusals = []

    class Intruder(Recorder):
        def update(self, state: ShownState) -> None:
            if state.stage == "tokens":
                with pytest.raises(DataError, match="is being prepared by another process") as caught:
                    prepare(config, directory)
                refusals.append(caught.value)

    prepare(config, directory, progress=Intruder())
    assert len(refusals) == 2
    assert not (directory / ".prepare.lock").exists()


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_lock_that_was_removed_hides_neither_the_end_nor_an_error(
    is_broken: bool, own_corpus: Path, finished: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "data"

    class Unlocking(Recorder):
        def update(self, state: ShownState) -> None:
            (directory / ".prepare.lock").unlink(missing_ok=True)

    if is_broken:
        (own_corpus / "code.jsonl").write_text("broken\n")
        with pytest.raises(DataError, match=r"code\.jsonl, line 1: not a readable JSON line"):
            prepare(two_sources(own_corpus), directory, progress=Unlocking())
    else:
        prepare(two_sources(own_corpus), directory, progress=Unlocking())
        assert contents(directory).keys() == contents(finished).keys()


def test_a_file_that_cannot_grow_is_explained_and_gone_on_with(
    corpus: Path,
    finished: Path,
    tmp_path: Path,
    small_batches: None,
    files_of_at_most: Callable[[int], AbstractContextManager[None]],
) -> None:
    config, directory = two_sources(corpus), tmp_path / "data"
    with files_of_at_most(40_000), pytest.raises(EvenpackError, match=r"File too large.* run the same command again"):
        prepare(config, directory)
    journal = json.loads((directory / "sources" / "wiki" / "tokens.journal.json").read_text())
    assert 0 < journal["documents"] < 451
    recorder = recorded(config, directory)
    assert recorder.states[0].bytes_resumed > 0
    assert contents(directory) == contents(finished)


def test_a_full_disk_is_named_and_the_same_call_resumes(
    corpus: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, directory = two_sources(corpus), tmp_path / "data"

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patch:
        patch.setattr("evenpack.data.prepare.splits.store_plan", fail)
        with pytest.raises(DataError, match=rf"{directory} cannot be written: No space left on device; make room"):
            prepare(config, directory)
    assert not (directory / "manifest.json").exists()
    prepare(config, directory)
    assert contents(directory) == contents(finished)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("tokenizer.trained_on.json", lambda _text: "[1]"),
        ("tokenizer/tokenizer.json", lambda text: text[:40]),
        ("tokenizer/tokenizer_config.json", lambda text: text.swapcase()),
    ],
)
def test_a_damaged_tokenizer_or_record_of_its_training_is_trained_again(
    name: str, damage: Callable[[str], str], corpus: Path, finished: Path, tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(finished, tmp_path / "data"))
    before = contents(directory)
    (directory / "manifest.json").unlink()
    (directory / name).write_text(damage((directory / name).read_text()))
    prepare(two_sources(corpus), directory)
    assert contents(directory) == before
