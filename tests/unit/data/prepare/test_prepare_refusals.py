"""`prepare` with wrong sources, concurrent calls and full disks leaves no half-written files."""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
from prepared_files import (
    Recorder,
    ShownState,
    StopAfter,
    StoppedError,
    contents,
    data_config,
    save_tokenizer,
    two_sources,
    write_jsonl,
)
from tokenizers import models, pre_tokenizers

from evenpack.data.prepare.prepare import prepare
from evenpack.data.prepare.workers import LocalWorkers
from evenpack.data.tokenizers.tokenizer import Tokenizer
from evenpack.errors import DataError, EvenpackError, PackingError


def save_words(folder: Path, end: str = "<end>") -> dict[str, str]:
    """Saves a vocabulary of one word; returns the section that names it."""
    backend = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "cat": 1, end: 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    Tokenizer(backend, end_of_text=end, unknown="[UNK]").save(folder)
    return {"kind": "hub", "name": str(folder)}


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
    recorder = Recorder()
    prepare(config, directory, progress=recorder)
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


def test_a_vocabulary_of_other_text_is_warned_of_with_the_first_batch_and_refused(
    corpus: Path, tmp_path: Path, small_batches: None
) -> None:
    with pytest.raises(DataError, match="the text of source 'wiki' encodes to nothing but unknown tokens"):
        prepare(two_sources(corpus, tokenizer=save_words(tmp_path / "words")), tmp_path / "data")


def test_unknown_tokens_are_counted_in_the_manifest(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "wiki.jsonl", ["cat cat", "cat dog", "dog cat bird"])
    config = data_config(
        {"wiki": {"kind": "jsonl", "path": tmp_path / "wiki.jsonl"}}, tokenizer=save_words(tmp_path / "words")
    )
    assert prepare(config, tmp_path / "data").sources["wiki"].unknown_tokens == 3


@pytest.mark.parametrize(("kind", "workers"), [("jsonl", None), ("text", None), ("parquet", None), ("jsonl", 2)])
def test_a_text_that_holds_the_end_of_documents_is_named_with_its_place(
    tmp_path: Path, kind: str, workers: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evenpack.data.prepare.source.SMALLEST_PART_BYTES", 100)
    texts = [f"cat {'cat ' * number}" for number in range(40)]
    texts[29] = "cat | cat"
    source: dict[str, Any] = {"kind": kind, "path": tmp_path / f"wiki.{kind}"}
    place = r"wiki\.jsonl, line 30"
    if kind == "jsonl":
        write_jsonl(source["path"], texts)
    elif kind == "text":
        source["document_separator"], place = "line", r"wiki\.text, line 30"
        source["path"].write_text("\n".join(texts))
    else:
        pq.write_table(pa.table({"text": texts}), source["path"], row_group_size=8)
        place = r"wiki\.parquet, row 29 \(from 0\)"
    config = data_config({"wiki": source}, tokenizer=save_words(tmp_path / "words", end="|"))
    with pytest.raises(
        DataError, match=rf"{place}: the tokenizer makes its special token '\|' of the text .*'cat \| cat'"
    ):
        prepare(config, tmp_path / "data", workers=None if workers is None else LocalWorkers(workers))


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


def test_a_folder_with_other_files_is_not_prepared(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(DataError, match=r"'thesis\.tex' first of 1"):
        prepare(two_sources(corpus), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_folder_in_the_place_of_the_manifest_is_refused_before_the_work(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "data" / "manifest.json").mkdir(parents=True)
    with pytest.raises(DataError, match=r"'manifest\.json' first of 1"):
        prepare(two_sources(corpus), tmp_path / "data")
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["manifest.json"]


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


class RemoveAt(Recorder):
    """Removes a file or folder at the first report of a stage of a source."""

    def __init__(self, path: Path, *, stage: str, source: str) -> None:
        super().__init__()
        self.path, self.at = path, (stage, source)

    def update(self, state: ShownState) -> None:
        super().update(state)
        if [(one.stage, one.source) for one in self.states].count(self.at) == 1 and self.path.exists():
            shutil.rmtree(self.path) if self.path.is_dir() else self.path.unlink()


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_lock_that_was_removed_hides_neither_the_end_nor_an_error(
    is_broken: bool, own_corpus: Path, finished: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "data"
    progress = RemoveAt(directory / ".prepare.lock", stage="tokenizer", source="wiki")
    if is_broken:
        with (own_corpus / "code.jsonl").open("a") as file:
            file.write("broken\n")
        with pytest.raises(DataError, match=r"code\.jsonl, line 151: not a readable JSON line"):
            prepare(two_sources(own_corpus), directory, progress=progress)
    else:
        prepare(two_sources(own_corpus), directory, progress=progress)
        assert contents(directory).keys() == contents(finished).keys()
    assert not progress.path.exists()


@pytest.mark.usefixtures("small_batches")
def test_a_folder_that_is_removed_meanwhile_is_named(corpus: Path, tmp_path: Path) -> None:
    directory = tmp_path / "data"
    progress = RemoveAt(directory, stage="tokens", source="wiki")
    with pytest.raises(
        EvenpackError, match=rf"{directory}.*: No such file or directory; .* run the same command again"
    ):
        prepare(two_sources(corpus), directory, progress=progress)
    assert not (directory / "manifest.json").exists()
    shutil.rmtree(directory, ignore_errors=True)
    prepare(two_sources(corpus), directory)


_LIMITED = """
import resource, signal, sys
from pathlib import Path
from evenpack.data.prepare import tokenising
from evenpack.data.tokens import writer
from evenpack.data.config import DataConfig
from evenpack.data.prepare.prepare import prepare
from evenpack.data.prepare.workers import LocalWorkers
from evenpack.errors import EvenpackError

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
tokenising.BATCH_TEXT_BYTES, writer.COMMIT_SECONDS = 4_000, 0.0
try:
    prepare(DataConfig.model_validate_json(sys.argv[1]), Path(sys.argv[2]))
except EvenpackError as error:
    print(error)
"""


def test_a_file_that_cannot_grow_is_explained_and_gone_on_with(corpus: Path, finished: Path, tmp_path: Path) -> None:
    config, directory = two_sources(corpus), tmp_path / "data"
    arguments = [config.model_dump_json(), str(directory), "40000"]
    run = subprocess.run([sys.executable, "-c", _LIMITED, *arguments], capture_output=True, text=True, check=True)
    assert "File too large" in run.stdout
    assert "run the same command again" in run.stdout
    journal = json.loads((directory / "sources" / "wiki" / "tokens.journal.json").read_text())
    assert 0 < journal["documents"] < 451
    recorder = Recorder()
    prepare(config, directory, progress=recorder)
    assert recorder.states[0].bytes_resumed > 0
    assert contents(directory) == contents(finished)


@pytest.mark.parametrize("stage", ["splits.store_plan", "source.SourcePreparation._write_tokens"])
def test_a_full_disk_is_named_and_the_same_call_resumes(
    stage: str, corpus: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, directory = two_sources(corpus), tmp_path / "data"

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patch:
        patch.setattr(f"evenpack.data.prepare.{stage}", fail)
        with pytest.raises(DataError, match=rf"{directory} cannot be written: No space left on device; make room"):
            prepare(config, directory)
    assert not (directory / "manifest.json").exists()
    prepare(config, directory)
    assert contents(directory) == contents(finished)


@pytest.mark.parametrize(
    "name", ["tokenizer.trained_on.json", "tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json"]
)
@pytest.mark.parametrize("damage", [lambda text: text[:40], lambda text: text.swapcase(), lambda _text: "[1]"])
def test_a_damaged_tokenizer_or_record_of_its_training_is_trained_again(
    name: str, damage: Callable[[str], str], corpus: Path, finished: Path, tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(finished, tmp_path / "data"))
    before = contents(directory)
    (directory / "manifest.json").unlink()
    (directory / name).write_text(damage((directory / name).read_text()))
    prepare(two_sources(corpus), directory)
    assert contents(directory) == before
