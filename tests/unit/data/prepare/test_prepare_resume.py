"""`prepare` called again resumes, does nothing, or refuses inputs that have changed."""

import os
from pathlib import Path

import pytest
from prepared_files import (
    Recorder,
    contents,
    interrupt,
    killed_at_flush,
    pairs_config,
    recorded,
    save_tokenizer,
    sentence_documents,
    two_sources,
    write_jsonl,
)
from slow_cases import slow_but

from evenpack.data.config import DataConfig
from evenpack.data.manifest import Manifest
from evenpack.data.prepare.prepare import prepare
from evenpack.errors import DataError


def test_a_second_call_does_nothing_and_says_so(corpus: Path, finished: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    recorder = Recorder()
    manifest = prepare(two_sources(corpus), finished, progress=recorder)
    assert manifest == Manifest.read(finished)
    assert recorder.notes == [f"{finished} is prepared already, and every file is as it was written: nothing to do"]
    assert {state.stage for state in recorder.states} == {"verification"}
    assert recorder.states[-1].bytes_read == sum(record.content.bytes for record in manifest.files.values())
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*")} == before


def test_an_interrupted_call_is_gone_on_with_where_it_was(
    corpus: Path, finished: Path, tmp_path: Path, small_batches: None
) -> None:
    config, directory = two_sources(corpus), tmp_path / "data"
    interrupt(config, directory, 5)
    assert not (directory / "manifest.json").exists()
    recorder = recorded(config, directory)
    assert {state.stage for state in recorder.states} == {"tokens"}, "the tokenizer is not trained again"
    assert recorder.states[0].documents > 40
    assert recorder.states[0].bytes_resumed > 0
    assert contents(directory) == contents(finished)


@pytest.mark.slow
def test_a_directory_that_was_killed_again_and_again_ends_up_byte_for_byte_the_same(
    corpus: Path, finished: Path, tmp_path: Path
) -> None:
    config, directory = two_sources(corpus), tmp_path / "data"
    killed = []
    for flushes in (1, 4, 6, 15, 41, 50, 60, 80, 10_000):
        if not killed_at_flush(flushes, config, directory):
            break
        assert not (directory / "manifest.json").exists()
        killed.append(sorted(path.name for path in directory.rglob("*")))
    assert len(killed) >= 6
    assert any("tokens.bin.partial" in names for names in killed), "killed within a token file"
    assert any("tokens.idx" in names and "tokens.bin.partial" in names for names in killed), "killed between sources"
    assert any("view.json" in names for names in killed), "killed while plans were stored"
    assert contents(directory) == contents(finished)


def test_a_changed_section_is_refused_while_unfinished_too(
    own_corpus: Path, tmp_path: Path, small_batches: None
) -> None:
    directory = tmp_path / "data"
    interrupt(two_sources(own_corpus), directory, 5)
    before = contents(directory / "sources")
    with pytest.raises(DataError, match=r"data\.tokenizer\.checksum: prepared with .*, this run has"):
        prepare(two_sources(own_corpus, tokenizer={"kind": "train", "vocabulary_size": 300}), directory)
    os.utime(own_corpus / "wiki.jsonl", ns=(1, 1))
    with pytest.raises(DataError, match=r"input file .*wiki\.jsonl has changed since"):
        prepare(two_sources(own_corpus), directory)
    assert contents(directory / "sources") == before


def test_a_half_written_source_is_not_gone_on_with_from_another_text(
    own_corpus: Path, tmp_path: Path, small_batches: None
) -> None:
    directory = tmp_path / "data"
    tokenizer = save_tokenizer(tmp_path / "tokenizer")
    interrupt(two_sources(own_corpus, tokenizer=tokenizer), directory, 5)
    before = contents(directory)
    os.utime(own_corpus / "wiki.jsonl", ns=(1, 1))
    with pytest.raises(DataError, match=r"wiki\.jsonl has changed since .*sources/wiki was prepared from it"):
        prepare(two_sources(own_corpus, tokenizer=tokenizer), directory)
    assert contents(directory) == before


def test_a_changed_input_of_finished_data_is_refused_and_a_missing_one_is_not(own_corpus: Path, tmp_path: Path) -> None:
    config, directory = two_sources(own_corpus), tmp_path / "data"
    prepare(config, directory)
    path = own_corpus / "code.jsonl"
    os.utime(path, ns=(1, 1))
    with pytest.raises(
        DataError, match=r"code\.jsonl has changed since .*\n.*now \d+ bytes, modified at 1970-01-01 00:00:00\.000"
    ):
        prepare(config, directory)
    path.unlink()
    prepare(config, directory)


def test_a_recipe_may_change_before_the_directory_is_finished(corpus: Path, finished: Path, tmp_path: Path) -> None:
    directory = tmp_path / "data"
    concat = {"kind": "concat", "max_sequence_length": 64}
    interrupt(two_sources(corpus, recipe=concat), directory, 2)
    assert (directory / "sources" / "wiki" / "train" / "stream_starts.npy").exists()
    strict = {"kind": "documents", "max_sequence_length": 64, "long_documents": "error"}
    with pytest.raises(DataError, match=r"recipe\.long_documents is 'error'"):
        prepare(two_sources(corpus, recipe=strict), directory)
    recorder = recorded(two_sources(corpus), directory)
    first = recorder.states[0]
    assert first.bytes_read == first.bytes_resumed == first.total_bytes, "the tokens were kept"
    assert contents(directory) == contents(finished)


def test_a_source_that_the_run_does_not_have_is_not_left_lying(corpus: Path, tmp_path: Path) -> None:
    directory = tmp_path / "data"
    config = two_sources(corpus, tokenizer=save_tokenizer(tmp_path / "tokenizer"))
    interrupt(config, directory, 2)
    with pytest.raises(DataError, match="sources/code was begun by an interrupted call"):
        prepare(config.model_copy(update={"sources": {"wiki": config.sources["wiki"]}}), directory)


@pytest.mark.parametrize("before", slow_but(["blocks"], ["blocks", "permutation"]))
def test_a_plan_of_another_order_that_an_interrupted_call_has_stored_is_removed(before: str, tmp_path: Path) -> None:
    """Pairs are the same in every order, so they are kept."""
    path = write_jsonl(tmp_path / "wiki.jsonl", sentence_documents(40, seed=1))

    def config(shuffle: str) -> DataConfig:
        return pairs_config(path, shuffle={"kind": shuffle, **({"block_tokens": 512} if shuffle == "blocks" else {})})

    after = "permutation" if before == "blocks" else "blocks"
    prepare(config(before), tmp_path / "resumed")
    (tmp_path / "resumed" / "manifest.json").unlink()
    resumed = prepare(config(after), tmp_path / "resumed")
    assert resumed.files == prepare(config(after), tmp_path / "data").files
