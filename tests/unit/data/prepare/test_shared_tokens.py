"""Sets of one corpus that share its tokens: tokenised once, checked like their own files, identified by contents."""

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prepared_files import (
    Recorder,
    ShownState,
    StoppedError,
    contents,
    flip,
    interrupt,
    recorded,
    save_tokenizer,
    two_sources,
)
from slow_cases import slow_but

from evenpack.data.config import DataConfig
from evenpack.data.manifest import Manifest
from evenpack.data.prepare import pairs
from evenpack.data.prepare.directory import hold_lock
from evenpack.data.prepare.prepare import prepare
from evenpack.data.prepared import PreparedData
from evenpack.data.tokens import writer as token_writer
from evenpack.data.verification import Verifier
from evenpack.errors import DataError

DOCUMENTS = {"recipe": {"kind": "documents", "max_sequence_length": 64}}
CONCAT = {"recipe": {"kind": "concat", "max_sequence_length": 64}}
PAIRS = {
    "tokenizer": {"kind": "train_word_pieces", "vocabulary_size": 120},
    "recipe": {"kind": "sentence_pairs", "max_sequence_length": 48, "duplication_factor": 1},
}


def sharing(corpus: Path, folder: Path, **changes: Any) -> DataConfig:
    """Returns the sources with their tokens in `folder`/tokens."""
    return two_sources(corpus, **changes).model_copy(update={"tokens_dir": folder / "tokens"})


def shared_files(folder: Path) -> list[str]:
    """Returns the files below `folder`/tokens, without the hashes in names."""
    return sorted(f"{path.parts[0].rpartition('_')[0]}/{path.name}" for path in map(Path, contents(folder / "tokens")))


@pytest.fixture(scope="module")
def both(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepares `documents` and `concat` with shared tokens; tests must not change them."""
    folder = tmp_path_factory.mktemp("shared")
    prepare(sharing(corpus, folder, **DOCUMENTS), folder / "documents")
    prepare(sharing(corpus, folder, **CONCAT), folder / "concat")
    return folder


@pytest.fixture
def own_both(both: Path, tmp_path: Path) -> Path:
    """Returns a copy, in another folder, that a test may change."""
    return Path(shutil.copytree(both, tmp_path / "both"))


def test_the_second_set_neither_trains_nor_tokenises(corpus: Path, both: Path, own_both: Path) -> None:
    recorder = Recorder()
    shutil.rmtree(own_both / "concat")
    prepare(sharing(corpus, own_both, **CONCAT), own_both / "concat", progress=recorder)
    assert {state.stage for state in recorder.states} == {"tokens"}
    assert all(state.bytes_read == state.bytes_resumed == state.total_bytes for state in recorder.states)
    assert [note.rpartition("/")[2].partition("_")[0] for note in recorder.notes] == ["wiki", "code"]
    assert contents(own_both / "tokens") == contents(both / "tokens")


def test_tokens_lie_in_the_shared_folder_alone_and_views_in_each_set(both: Path) -> None:
    of_source = ["document_hashes.npy", "tokens.bin", "tokens.idx", "tokens.journal.json"]
    assert [name for name in shared_files(both) if "tokenizer" not in name] == [
        f"{source}/{name}" for source in ("code", "wiki") for name in of_source
    ]
    for name in ("documents", "concat"):
        own = {Path(path).name for path in contents(both / name)}
        assert not own & set(of_source)
        assert {"view.json", "tokenizer.json"} <= own


def test_a_set_is_the_same_wherever_its_tokens_lie(corpus: Path, both: Path, own_both: Path, finished: Path) -> None:
    config = two_sources(corpus)
    expected = PreparedData.open(finished, config)
    for directory in (both / "documents", own_both / "documents"):
        prepared = PreparedData.open(directory, config)
        assert prepared.fingerprint(1) == expected.fingerprint(1)
        assert prepared.manifest.files.keys() == expected.manifest.files.keys()
        for name in prepared.source_names:
            views = (one.view(name, "train") for one in (prepared, expected))
            mine, its = (view.read(np.arange(view.count)).tokens for view in views)
            np.testing.assert_array_equal(mine, its)


@pytest.mark.parametrize("name", slow_but(["tokens.bin"], ["tokens.bin", "tokens.idx", "document_hashes.npy"]))
def test_damage_of_a_shared_file_is_found_by_each_set_and_before_it_is_reused(
    corpus: Path, own_both: Path, name: str
) -> None:
    (damaged,) = own_both.glob(f"tokens/wiki_*/{name}")
    flip(damaged)
    for directory in (own_both / "documents", own_both / "concat"):
        verifier = Verifier(directory, Manifest.read(directory))
        shares = [verifier.verify_share(rank, 2, is_cancelled=lambda: False).damages for rank in range(2)]
        assert [damage.path for damages in shares for damage in damages] == [damaged]
        with pytest.raises(DataError) as caught:
            verifier.refuse(verifier.verify_all(Recorder()).damages)
        assert f"remove {damaged.parent} (of data.tokens_dir) and {directory}, and prepare" in str(caught.value)
    with pytest.raises(DataError, match=rf"{damaged}.*remove the folder {damaged.parent} and prepare again"):
        prepare(sharing(corpus, own_both, **CONCAT, pack_length=64), own_both / "third")


def test_a_removed_folder_is_missed_and_comes_back_with_the_next_preparation(corpus: Path, own_both: Path) -> None:
    config = sharing(corpus, own_both, **DOCUMENTS)
    (tokens,) = own_both.glob("tokens/wiki_*")
    shutil.rmtree(tokens)
    for attempt in (PreparedData.open, lambda directory, config: prepare(config, directory)):
        with pytest.raises(DataError) as caught:
            attempt(own_both / "documents", config)
        assert str(tokens / "tokens.bin") in str(caught.value)
        assert f"remove {tokens} (of data.tokens_dir) and {own_both / 'documents'}" in str(caught.value)
    shutil.rmtree(own_both / "documents")
    prepare(config, own_both / "documents")
    PreparedData.open(own_both / "concat", sharing(corpus, own_both, **CONCAT))
    verifier = Verifier(own_both / "concat", Manifest.read(own_both / "concat"))
    assert verifier.verify_all(Recorder()).damages == ()


def test_another_set_resumes_where_an_interrupted_one_stopped(
    corpus: Path, both: Path, tmp_path: Path, small_batches: None
) -> None:
    interrupt(sharing(corpus, tmp_path, **DOCUMENTS), tmp_path / "documents", 5)
    recorder = recorded(sharing(corpus, tmp_path, **CONCAT), tmp_path / "concat")
    assert {state.stage for state in recorder.states} == {"tokens"}, "the tokenizer is not trained again"
    assert recorder.states[0].documents > 40
    assert recorder.states[0].bytes_resumed > 0
    assert contents(tmp_path / "tokens") == contents(both / "tokens")


def test_a_changed_source_gets_tokens_of_its_own_and_the_others_keep_theirs(own_corpus: Path, tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path / "tokenizer")
    config = sharing(own_corpus, tmp_path, tokenizer=tokenizer)
    prepare(config, tmp_path / "before")
    os.utime(own_corpus / "wiki.jsonl", ns=(1, 1))
    prepare(config, tmp_path / "after")
    assert len(list(tmp_path.glob("tokens/wiki_*"))) == 2
    assert len(list(tmp_path.glob("tokens/code_*"))) == 1
    before = Verifier(tmp_path / "before", Manifest.read(tmp_path / "before"))
    assert before.verify_all(Recorder()).damages == ()


def test_two_processes_do_not_write_the_same_tokens(corpus: Path, own_both: Path) -> None:
    (tokens,) = own_both.glob("tokens/wiki_*")
    third = sharing(corpus, own_both, **CONCAT, pack_length=64)
    with hold_lock(tokens), pytest.raises(DataError, match=rf"{tokens} is being prepared by another process: wait"):
        prepare(third, own_both / "third")
    prepare(third, own_both / "third")


def test_a_place_that_cannot_serve_is_refused_and_nothing_is_left(corpus: Path, tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path / "tokenizer")
    config = two_sources(corpus, tokenizer=tokenizer)
    within = config.model_copy(update={"tokens_dir": tmp_path / "data" / "tokens"})
    with pytest.raises(DataError, match=r"tokens_dir .* is within the prepared directory .*: choose a folder outside"):
        prepare(within, tmp_path / "data")
    (tmp_path / "file").touch()
    in_file = config.model_copy(update={"tokens_dir": tmp_path / "file"})
    with pytest.raises(DataError, match=r"cannot be prepared: .*; choose another data\.tokens_dir"):
        prepare(in_file, tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_what_a_directory_has_begun_by_itself_it_completes(
    corpus: Path, finished: Path, tmp_path: Path, small_batches: None
) -> None:
    interrupt(two_sources(corpus), tmp_path / "data", 5)
    recorder = recorded(sharing(corpus, tmp_path), tmp_path / "data")
    assert recorder.states[0].stage == "tokens"
    assert recorder.states[0].bytes_resumed > 0
    own = {name for name in contents(tmp_path / "data") if "sources/wiki" in name}
    assert own == {name for name in contents(finished) if "sources/wiki" in name}
    assert shared_files(tmp_path)[0] == "code/document_hashes.npy", "the source that was not begun"


def test_half_made_pairs_are_not_continued_from_other_tokens(
    own_corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairs, "BLOCK_SENTENCES", 100)
    monkeypatch.setattr(token_writer, "COMMIT_SECONDS", 0.0)

    config = sharing(own_corpus, tmp_path, **PAIRS)
    interrupt(config, tmp_path / "data", 3, stage="pairs")
    texts = (own_corpus / "wiki.jsonl").read_text().splitlines(keepends=True)
    (own_corpus / "wiki.jsonl").write_text("".join(texts[5:]))
    prepare(config, tmp_path / "data")
    prepare(two_sources(own_corpus, **PAIRS), tmp_path / "fresh")
    made, expected = (
        {name: found for name, found in contents(tmp_path / folder).items() if name.endswith("pairs.bin")}
        for folder in ("data", "fresh")
    )
    assert made == expected
    assert len(made) == 4


def test_a_shuffle_of_shared_tokens_is_that_of_own_ones_and_of_these_tokens_alone(corpus: Path, tmp_path: Path) -> None:
    class StopAtShuffle(Recorder):
        def update(self, state: ShownState) -> None:
            super().update(state)
            if state.stage == "shuffle" and state.bytes_read == state.total_bytes:
                raise StoppedError

    grid = {"shuffle": {"kind": "grid", "rows": 2, "columns": 3}}
    config = sharing(corpus, tmp_path, **grid)
    prepare(two_sources(corpus, **grid), tmp_path / "own")
    other = {"tokenizer": {"kind": "train", "vocabulary_size": 300}}
    with pytest.raises(StoppedError):
        prepare(sharing(corpus, tmp_path, **grid, **other), tmp_path / "data", progress=StopAtShuffle())
    prepare(config, tmp_path / "data")
    fingerprints = {PreparedData.open(tmp_path / name, config).fingerprint(1) for name in ("own", "data")}
    assert len(fingerprints) == 1
