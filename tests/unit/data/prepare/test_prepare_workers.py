"""Preparation by any number of processes gives the same bytes, and loses little if one of them dies."""

import errno
import os
import shutil
import socket
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from dying_parts import DyingCorpus
from prepared_files import (
    StopAfter,
    StoppedError,
    contents,
    data_config,
    interrupt,
    recorded,
    save_tokenizer,
    save_words,
    sentences,
    two_sources,
    write_jsonl,
)
from slow_cases import slow_but

from evenpack.data.config import DataConfig
from evenpack.data.prepare import prepare as prepare_module
from evenpack.data.prepare import source as source_module
from evenpack.data.prepare import tokenising
from evenpack.data.prepare.prepare import prepare
from evenpack.data.prepare.source import part_bytes
from evenpack.data.prepare.workers import (
    LocalWorkers,
    MpiWorkers,
    PartFile,
    PartTask,
    local_workers,
    stop_file,
    write_part,
)
from evenpack.data.sources.config import BuiltinSource
from evenpack.data.sources.corpus import Corpus
from evenpack.data.sources.kinds import open_corpus
from evenpack.data.tokenizers.tokenizer import Tokenizer
from evenpack.errors import DataError, RunError

PART_BYTES = 15_000
"""The corpus of `two_sources` has 12 such parts."""


@pytest.fixture(scope="module", autouse=True)
def small_parts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source_module, "SMALLEST_PART_BYTES", PART_BYTES)
        yield


class HereWorkers:
    """Writes parts in this process, one after another, so that a test can look at them and change them."""

    def __init__(self, after: Callable[[PartFile], None] = lambda _: None) -> None:
        self.after = after
        self.numbers: list[int] = []

    def files(self, tasks: Sequence[PartTask]) -> Generator[PartFile, None, None]:
        for task in tasks:
            self.numbers.append(task.number)
            file = write_part(task)
            self.after(file)
            yield file
            assert not task.prefix.parent.exists(), "what is joined is removed"


@pytest.fixture(scope="module")
def in_parts(corpus: Path, small_parts: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepares the two sources with this process alone, part by part; tests must not change the result."""
    directory = tmp_path_factory.mktemp("in_parts") / "data"
    prepare(two_sources(corpus), directory)
    return directory


def without_journals(directory: Path) -> dict[str, bytes]:
    return {name: content for name, content in contents(directory).items() if not name.endswith(".journal.json")}


def test_the_size_of_parts_does_not_show(finished: Path, in_parts: Path) -> None:
    assert without_journals(in_parts) == without_journals(finished)


@pytest.mark.parametrize("workers", slow_but([3], [1, 2, 3]))
def test_any_number_of_workers_writes_the_same_bytes(
    workers: int, corpus: Path, in_parts: Path, tmp_path: Path
) -> None:
    recorder = recorded(two_sources(corpus), tmp_path / "data", workers=LocalWorkers(workers))
    assert contents(tmp_path / "data") == contents(in_parts)
    states = [state for state in recorder.states if state.stage == "tokens" and state.source == "wiki"]
    assert len(states) > 5, "a report for each part"
    assert states[-1].bytes_read == states[-1].total_bytes


PAIRS = {
    "tokenizer": {"kind": "train_word_pieces", "vocabulary_size": 300},
    "recipe": {"kind": "sentence_pairs", "max_sequence_length": 64},
}


@pytest.mark.parametrize(
    ("source", "changes"),
    [
        pytest.param({"rows": "lines", "minimum_words": 30}, {}, id="rows"),
        pytest.param({"rows": "lines", "minimum_words": 30, "maximum_rows": 40}, {}, id="first rows, one part"),
        pytest.param({}, PAIRS, id="sentences"),
    ],
)
def test_rows_and_sentences_do_not_depend_on_workers(
    source: dict[str, Any], changes: dict[str, Any], tmp_path: Path
) -> None:
    texts = ["\n \n".join(sentences(n % 9, seed=n)) for n in range(60)]
    path = write_jsonl(tmp_path / "articles.jsonl", [*texts, *["a short line\nanother"] * 60])
    config = data_config({"wiki": {"kind": "jsonl", "path": path, **source}}, **changes)
    for name, workers in (("alone", None), ("together", HereWorkers())):
        prepare(config, tmp_path / name, workers=workers)
    assert contents(tmp_path / "alone") == contents(tmp_path / "together"), "with the accounting in the manifest"


def test_a_worker_that_is_killed_ends_the_call_and_the_same_call_resumes(
    corpus: Path, in_parts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, deaths = _loaded(two_sources(corpus), in_parts), tmp_path / "deaths"

    def open_dying(name: str, source: Any) -> Corpus:
        corpus = open_corpus(name, source)
        # Two workers are given this part once the first one is joined: eight may be ahead of it.
        return DyingCorpus(corpus=corpus, part=8, deaths=deaths) if name == "wiki" else corpus

    monkeypatch.setattr(prepare_module, "open_corpus", open_dying)
    with pytest.raises(RunError, match=r"a worker that tokenised source 'wiki' died.*The same command resumes"):
        prepare(config, tmp_path / "data", workers=LocalWorkers(2))
    recorder = recorded(config, tmp_path / "data", workers=LocalWorkers(2))
    assert deaths.read_text() == str(max(1, len(os.sched_getaffinity(0)) // 2)), "one death, and threads of Rust"
    assert recorder.states[0].bytes_resumed > 0
    assert not list((tmp_path / "data").rglob("tokens.parts"))
    for name in ("tokens.bin", "tokens.idx", "document_hashes.npy"):
        for source in config.sources:
            written = tmp_path / "data" / "sources" / source / name
            assert written.read_bytes() == (in_parts / "sources" / source / name).read_bytes()


def test_what_one_process_began_workers_resume_and_the_other_way_round(
    corpus: Path, in_parts: Path, tmp_path: Path, small_batches: None
) -> None:
    config, directory = two_sources(corpus), tmp_path / "data"
    interrupt(config, directory, 6)
    workers, recorder = HereWorkers(), StopAfter(5)
    with pytest.raises(StoppedError):
        prepare(config, directory, progress=recorder, workers=workers)
    assert recorder.states[0].bytes_resumed > 0
    assert workers.numbers[0] >= 1, "what the process had begun it has finished itself"
    prepare(config, directory)
    assert contents(directory) == contents(in_parts)


def test_unfinished_parts_are_removed_where_the_tokens_come_to_lie_elsewhere(corpus: Path, tmp_path: Path) -> None:
    config, directory = two_sources(corpus), tmp_path / "data"

    def stop(_: PartFile) -> None:
        raise StoppedError

    with pytest.raises(StoppedError):
        prepare(config, directory, workers=HereWorkers(stop))
    assert list(directory.rglob("tokens.bin.partial"))
    prepare(config.model_copy(update={"tokens_dir": tmp_path / "tokens"}), directory)
    assert not list(directory.rglob("tokens.*"))


def test_text_of_another_script_in_a_part_is_counted_and_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_module, "SMALLEST_PART_BYTES", 4000)
    texts = [*["cat"] * 300, *["\u6f22\u5b57 \u6f22 \u6f22"] * 400]
    path = write_jsonl(tmp_path / "two_scripts.jsonl", texts)
    config = data_config({"a": {"kind": "jsonl", "path": path}}, tokenizer=save_words(tmp_path / "words"))
    manifests = [
        prepare(config, tmp_path / name, workers=workers)
        for name, workers in (("alone", None), ("together", HereWorkers()))
    ]
    assert contents(tmp_path / "alone") == contents(tmp_path / "together")
    assert {manifest.sources["a"].unknown_tokens for manifest in manifests} == {1200}


def test_a_host_that_cannot_read_the_source_is_named_and_nothing_is_removed(own_corpus: Path, tmp_path: Path) -> None:
    config, directory = two_sources(own_corpus), tmp_path / "data"

    def hide(file: PartFile) -> None:
        if file.prefix.parent.name == "000002":
            (own_corpus / "wiki.jsonl").rename(own_corpus / "hidden.jsonl")

    with pytest.raises(RunError, match=rf"part 3 of source 'wiki' could not be read on host {socket.gethostname()}: "):
        prepare(config, directory, workers=HereWorkers(hide))
    (own_corpus / "hidden.jsonl").rename(own_corpus / "wiki.jsonl")
    recorder = recorded(config, directory, workers=HereWorkers())
    assert recorder.states[0].bytes_resumed > 0


@pytest.mark.parametrize(("change", "message"), [("remove", "is not there on host"), ("replace", "another tokenizer")])
def test_a_host_that_sees_another_directory_is_named(
    change: str, message: str, corpus: Path, in_parts: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(in_parts / "tokenizer", tmp_path / "tokenizer"))
    task = replace(
        a_task(0), tokenizer_folder=folder, tokenizer_checksum="of another", prefix=tmp_path / "a" / "tokens"
    )
    if change == "remove":
        shutil.rmtree(folder)
    with pytest.raises(RunError, match=message):
        write_part(task)


def test_a_full_disk_of_a_worker_names_its_file(
    corpus: Path, in_parts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("evenpack.data.tokens.writer.GrowingFile.write", fail)
    with pytest.raises(RunError, match=r"tokens cannot be written: No space left on device; make room on its disk"):
        prepare(two_sources(corpus), tmp_path / "data", workers=HereWorkers())


def test_at_a_mistake_ranks_of_mpi_are_asked_to_end_and_waited_for_and_parts_ahead_are_cancelled(
    tmp_path: Path,
) -> None:
    class Busy(Executor):
        def submit(self, function: Any, task: PartTask) -> Future[PartFile]:  # type: ignore[override]
            assert function is write_part
            future: Future[PartFile] = Future()
            submitted.append(future)
            if task.number == 0:
                future.set_exception(DataError("a mistake"))
            elif task.number < 3:
                future.set_running_or_notify_cancel()
                Thread(target=self.work, args=(task, future)).start()
            return future

        def work(self, task: PartTask, future: Future[PartFile]) -> None:
            while not stop_file(task.prefix.parents[1]).exists():
                time.sleep(0.01)
            ended.append(task.number)
            future.set_exception(RunError("given up"))

    ended: list[int] = []
    submitted: list[Future[PartFile]] = []
    tasks = [replace(a_task(number), prefix=tmp_path / f"{number}" / "tokens") for number in range(100)]
    with pytest.raises(DataError, match="a mistake"):
        list(MpiWorkers(Busy(), 2).files(tasks))
    assert sorted(ended) == [1, 2]
    assert len(submitted) == 8, "no more than four ahead of each worker"
    assert all(future.cancelled() for future in submitted[3:])


def test_a_worker_that_is_asked_to_end_does(corpus: Path, in_parts: Path, tmp_path: Path) -> None:
    task = replace(
        a_task(0),
        part=open_corpus("wiki", two_sources(corpus).sources["wiki"]).parts(PART_BYTES)[0],
        tokenizer_folder=in_parts / "tokenizer",
        tokenizer_checksum=Tokenizer.load(in_parts / "tokenizer").checksum,
        prefix=tmp_path / "0" / "tokens",
    )
    stop_file(tmp_path).touch()
    with pytest.raises(RunError, match="part 0 of source 'text' was given up"):
        write_part(task)
    stop_file(tmp_path).unlink()
    assert write_part(task).journal.complete


def test_how_many_workers_and_how_large_their_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [part_bytes(size) for size in (0, 1 << 36, 1 << 50)] == [PART_BYTES, 1 << 26, 1 << 30]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    assert vars(local_workers(None)) == vars(LocalWorkers(6))
    assert local_workers(1) is None
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert local_workers(None) is None
    monkeypatch.setenv("RAYON_NUM_THREADS", "2")
    assert tokenising.encoding_threads() == 2
    monkeypatch.setenv("RAYON_NUM_THREADS", "64")
    assert tokenising.encoding_threads() == 4


@pytest.mark.parametrize("name", slow_but(["tokens.bin"], ["tokens.bin", "tokens.idx", "document_hashes.npy"]))
def test_a_part_that_changes_between_worker_and_joining_is_refused(name: str, corpus: Path, tmp_path: Path) -> None:
    def damage(file: PartFile) -> None:
        path = file.prefix.with_name(name)
        path.write_bytes(path.read_bytes()[:-1] + b"?")

    with pytest.raises(RunError, match=rf"{name} is not as .*, process \d+ wrote it"):
        prepare(two_sources(corpus), tmp_path / "data", workers=HereWorkers(damage))


def test_a_mistake_in_a_part_reads_as_without_workers_and_leaves_nothing(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "bad.jsonl", sentences(400, seed=1))
    lines = path.read_text().splitlines()
    lines[300] = '{"text": 5}'
    path.write_text("\n".join(lines) + "\n")
    config = data_config({"wiki": {"kind": "jsonl", "path": path}}, tokenizer=save_tokenizer(tmp_path / "tokenizer"))
    messages = []
    for name, workers in (("alone", None), ("together", HereWorkers())):
        with pytest.raises(DataError) as caught:
            prepare(config, tmp_path / name, workers=workers)
        messages.append(str(caught.value))
        assert not list((tmp_path / name).rglob("tokens*"))
    assert messages[0] == messages[1]
    assert f"{path}, line 301: 'text' must be a string, found int" in messages[0]


def test_a_source_that_changes_while_it_is_read_is_refused_and_leaves_nothing(own_corpus: Path, tmp_path: Path) -> None:
    def touch(file: PartFile) -> None:
        with (own_corpus / "wiki.jsonl").open("a") as lines:
            lines.write('{"text": "another document"}\n')

    directory = tmp_path / "data"
    with pytest.raises(DataError, match=r"source 'wiki' changed while it was read: .*wiki\.jsonl is new, gone or"):
        prepare(two_sources(own_corpus), directory, workers=HereWorkers(touch))
    assert not list(directory.rglob("tokens*"))
    prepare(two_sources(own_corpus), directory)


def a_task(number: int) -> PartTask:
    return PartTask(
        number=number,
        part=open_corpus("text", BuiltinSource(kind="builtin")).parts(1)[0],
        source="text",
        prefix=Path("tokens"),
        tokenizer_folder=Path("tokenizer"),
        tokenizer_checksum="",
        language=None,
    )


def _loaded(config: DataConfig, prepared: Path) -> DataConfig:
    """Returns the config with the tokenizer that another directory has trained."""
    tokenizer = {"kind": "hub", "name": str(prepared / "tokenizer")}
    return DataConfig.model_validate({**config.model_dump(), "tokenizer": tokenizer})
