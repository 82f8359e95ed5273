"""From text to a prepared directory: nothing lost, nothing done twice, nothing half-written."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from evenpack.data import prepare_source, tokenise
from evenpack.data.corpus import open_corpus
from evenpack.data.data_config import DataConfig, TrainedTokenizer
from evenpack.data.manifest import Manifest
from evenpack.data.prepare import prepare
from evenpack.data.prepared import PreparedData
from evenpack.data.progress import PrepareState
from evenpack.data.split import held_out
from evenpack.data.token_file import TokenFile, TokenFileWriter
from evenpack.data.tokenizer import Tokenizer, train_tokenizer
from evenpack.errors import DataError, PackingError
from tests.prepared_files import Recorder, contents, data_config, sentences, write_jsonl


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two jsonl files; the first holds each of its first fifty documents twice, and one empty document."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = sentences(400, seed=1)
    write_jsonl(folder / "wiki.jsonl", [*texts, *texts[:50], ""])
    write_jsonl(folder / "code.jsonl", sentences(150, seed=2))
    return folder


def two_sources(corpus: Path, **changes: Any) -> DataConfig:
    sources = {name: {"kind": "jsonl", "path": corpus / f"{name}.jsonl"} for name in ("wiki", "code")}
    return data_config(sources, **changes)


@pytest.fixture(scope="module")
def finished(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The two sources, prepared without interruption; not to be changed."""
    directory = tmp_path_factory.mktemp("finished") / "data"
    prepare(two_sources(corpus), directory)
    return directory


@pytest.fixture
def own_corpus(corpus: Path, tmp_path: Path) -> Path:
    """A copy of the corpus that a test may change."""
    return Path(shutil.copytree(corpus, tmp_path / "own"))


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many batches, each committed."""
    monkeypatch.setattr(tokenise, "BATCH_TEXT_BYTES", 4000)
    monkeypatch.setattr(tokenise, "COMMIT_SECONDS", 0.0)


def texts_of(config: DataConfig, name: str) -> list[str]:
    return [document.text for document in open_corpus(name, config.sources[name]).documents()]


class Stop(Exception):
    """Ends a call from within its progress."""


class StopAfter(Recorder):
    """Interrupts `prepare` at the n-th report of tokens."""

    def __init__(self, updates: int) -> None:
        super().__init__()
        self.left = updates

    def update(self, state: PrepareState) -> None:
        super().update(state)
        self.left -= state.stage == "tokens"
        if self.left == 0:
            raise Stop


# What is written


def test_the_token_file_holds_every_document_in_order(corpus: Path, finished: Path) -> None:
    config = two_sources(corpus)
    tokenizer = Tokenizer.load(finished / "tokenizer")
    for name in config.sources:
        token_file = TokenFile(finished / "sources" / name / "tokens")
        offsets, lengths = token_file.spans(np.arange(token_file.documents))
        written = [token_file.gather(offsets[n : n + 1], lengths[n : n + 1]) for n in range(token_file.documents)]
        assert all(tokens[-1] == tokenizer.end_of_text_id for tokens in written)
        assert [tokenizer.decode(tokens[:-1].tolist()) for tokens in written] == texts_of(config, name)


def test_the_ledger_accounts_for_every_token_read(corpus: Path, tmp_path: Path) -> None:
    recipe = {"kind": "documents", "max_sequence_length": 64, "long_documents": "truncate"}
    config = two_sources(corpus, recipe=recipe)
    manifest = prepare(config, tmp_path / "data")
    for name, source in manifest.sources.items():
        encoded = Tokenizer.load(tmp_path / "data" / "tokenizer").encode_batch(texts_of(config, name))
        assert source.documents == len(encoded.lengths)
        assert source.tokens == len(encoded.tokens)
        assert source.text_bytes == sum(len(text.encode()) for text in texts_of(config, name))
        ledgers = [source.train.ledger, source.validation.ledger]
        kept = sum(ledger.tokens_kept for ledger in ledgers)
        cut = sum(ledger.tokens_cut for ledger in ledgers)
        assert kept == int(np.minimum(encoded.lengths, 64)[encoded.lengths >= 2].sum())
        assert cut == int(np.maximum(encoded.lengths - 64, 0).sum()) > 0
        assert kept + cut + sum(ledger.tokens_dropped for ledger in ledgers) == source.tokens
        for split in (source.train, source.validation):
            assert split.packing is not None
            assert split.packing.tokens == split.ledger.tokens_kept
            assert split.packing.padding == split.packing.packs * 128 - split.packing.tokens
    empty = manifest.sources["wiki"].train.ledger, manifest.sources["wiki"].validation.ledger
    assert sum(ledger.documents_too_short for ledger in empty) == 1


def test_each_training_sequence_is_in_exactly_one_pack_of_an_epoch(corpus: Path, finished: Path) -> None:
    prepared = PreparedData.open(finished, two_sources(corpus))
    for name in prepared.source_names:
        for split in ("train", "validation"):
            view, plan = prepared.view(name, split), prepared.plan(name, split, seed=3)
            drawn = plan.draw(np.arange(plan.packs, 2 * plan.packs))
            assert sorted(drawn.sequence_ids.tolist()) == list(range(view.count))
            np.testing.assert_array_equal(drawn.lengths, view.lengths()[drawn.sequence_ids])


def test_the_split_follows_the_text_alone(corpus: Path, finished: Path) -> None:
    config = two_sources(corpus)
    for name in config.sources:
        identities = np.array([xxhash.xxh3_64_intdigest(text.encode()) for text in texts_of(config, name)], np.uint64)
        np.testing.assert_array_equal(np.load(finished / "sources" / name / "document_hashes.npy"), identities)
        out = held_out(identities, 0.1)
        assert 0.03 < out.mean() < 0.2
        lengths = TokenFile(finished / "sources" / name / "tokens").document_lengths
        for split, chosen in (("train", ~out), ("validation", out)):
            documents = np.load(finished / "sources" / name / split / "documents.npy")
            assert documents.tolist() == np.flatnonzero(chosen & (lengths >= 2)).tolist()
    identities = np.load(finished / "sources" / "wiki" / "document_hashes.npy")
    np.testing.assert_array_equal(held_out(identities[:50], 0.1), held_out(identities[400:450], 0.1))


def test_the_held_out_share_grows_without_moving_documents_back() -> None:
    identities = np.arange(100_000, dtype=np.uint64)
    shares = [0.0, 0.01, 0.3, 0.999]
    chosen = [held_out(identities, share) for share in shares]
    for share, out in zip(shares, chosen, strict=True):
        assert abs(out.mean() - share) < 0.006
    assert not (chosen[1] & ~chosen[2]).any()
    assert not (chosen[2] & ~chosen[3]).any()


def test_a_tokenizer_is_trained_on_the_training_documents_only(corpus: Path, tmp_path: Path) -> None:
    config = two_sources(corpus, validation_fraction=0.5)
    prepare(config, tmp_path / "data")
    texts = [text for name in config.sources for text in texts_of(config, name)]
    out = held_out(np.array([xxhash.xxh3_64_intdigest(text.encode()) for text in texts], np.uint64), 0.5)
    assert isinstance(config.tokenizer, TrainedTokenizer)
    expected = train_tokenizer(config.tokenizer, [text for text, held in zip(texts, out, strict=True) if not held])
    everything = train_tokenizer(config.tokenizer, texts)
    assert Tokenizer.load(tmp_path / "data" / "tokenizer").checksum == expected.checksum != everything.checksum


def test_the_bounds_of_batches_do_not_show(corpus: Path, finished: Path, tmp_path: Path, small_batches: None) -> None:
    recorder = Recorder()
    prepare(two_sources(corpus), tmp_path / "data", progress=recorder)
    assert len(recorder.states) > 20
    assert contents(tmp_path / "data") == contents(finished)


def test_all_sources_can_be_held_whole_for_training(corpus: Path, tmp_path: Path) -> None:
    config = two_sources(corpus, validation_fraction=0.0)
    manifest = prepare(config, tmp_path / "data")
    assert manifest.sources["wiki"].validation.packing is None
    prepared = PreparedData.open(tmp_path / "data", config)
    assert prepared.view("wiki", "validation").count == 0
    with pytest.raises(DataError, match=r"no sequence for validation: raise data\.validation_fraction"):
        prepared.plan("wiki", "validation", seed=0)


@pytest.mark.parametrize("kind", ["text", "builtin"])
def test_other_kinds_of_text_are_prepared(kind: str, corpus: Path, tmp_path: Path) -> None:
    source = {"kind": "builtin"} if kind == "builtin" else {"kind": "text", "path": tmp_path / "*.txt"}
    (tmp_path / "a.txt").write_text("\n\n".join(sentences(60, seed=4)))
    if kind == "text":
        source["document_separator"] = "blank_line"
    recipe = {"kind": "concat", "max_sequence_length": 128}
    manifest = prepare(data_config({"source": source}, recipe=recipe), tmp_path / "data")
    assert manifest.sources["source"].documents == 60 if kind == "text" else manifest.sources["source"].documents > 1000


def test_progress_counts_up_to_the_end_of_each_source(corpus: Path, tmp_path: Path, small_batches: None) -> None:
    recorder = Recorder()
    manifest = prepare(two_sources(corpus), tmp_path / "data", progress=recorder)
    assert [state.stage for state in recorder.states if state.source == "wiki"][0] == "tokenizer"
    for name in manifest.sources:
        states = [state for state in recorder.states if state.source == name and state.stage == "tokens"]
        assert [state.bytes_read for state in states] == sorted(state.bytes_read for state in states)
        assert states[-1].bytes_read == states[-1].total_bytes == (corpus / f"{name}.jsonl").stat().st_size
        assert states[-1].tokens == manifest.sources[name].tokens
        assert states[-1].bytes_per_second > 0
        assert states[-1].remaining_seconds == 0


# Going on


def test_a_second_call_does_nothing_and_says_so(corpus: Path, finished: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    recorder = Recorder()
    manifest = prepare(two_sources(corpus), finished, progress=recorder)
    assert manifest == Manifest.read(finished)
    assert recorder.notes == [f"{finished} is prepared already: nothing to do"]
    assert recorder.states == []
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*")} == before


def test_an_interrupted_call_is_gone_on_with_where_it_was(
    corpus: Path, finished: Path, tmp_path: Path, small_batches: None
) -> None:
    config, directory = two_sources(corpus), tmp_path / "data"
    with pytest.raises(Stop):
        prepare(config, directory, progress=StopAfter(5))
    assert not (directory / "manifest.json").exists()
    recorder = Recorder()
    prepare(config, directory, progress=recorder)
    assert {state.stage for state in recorder.states} == {"tokens"}, "the tokenizer is not trained again"
    assert recorder.states[0].documents > 40
    assert recorder.states[0].bytes_resumed > 0
    assert contents(directory) == contents(finished)


_KILLED = """
import os, signal, sys
from pathlib import Path
from evenpack.data import tokenise
from evenpack.data.data_config import DataConfig
from evenpack.data.prepare import prepare

left = int(sys.argv[3])
flush = os.fsync
def kill_at(descriptor):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    flush(descriptor)

os.fsync = kill_at
tokenise.BATCH_TEXT_BYTES, tokenise.COMMIT_SECONDS = 10_000, 0.0
prepare(DataConfig.model_validate_json(sys.argv[1]), Path(sys.argv[2]))
"""


def test_a_directory_that_was_killed_again_and_again_ends_up_byte_for_byte_the_same(
    corpus: Path, finished: Path, tmp_path: Path
) -> None:
    config, directory = two_sources(corpus), tmp_path / "data"
    killed = []
    for flushes in (1, 4, 6, 15, 41, 50, 60, 80, 10_000):
        arguments = [config.model_dump_json(), str(directory), str(flushes)]
        status = subprocess.run([sys.executable, "-c", _KILLED, *arguments], check=False).returncode
        if status == 0:
            break
        assert status == -signal.SIGKILL
        assert not (directory / "manifest.json").exists()
        killed.append(sorted(path.name for path in directory.rglob("*")))
    assert len(killed) >= 6
    assert any("tokens.bin.partial" in names for names in killed), "killed within a token file"
    assert any("tokens.idx" in names and "tokens.bin.partial" in names for names in killed), "killed between sources"
    assert any("view.json" in names for names in killed), "killed while plans were stored"
    assert contents(directory) == contents(finished)


def test_a_changed_data_section_is_refused_by_key(corpus: Path, finished: Path) -> None:
    recipe = {"kind": "documents", "max_sequence_length": 32}
    with pytest.raises(DataError) as caught:
        prepare(two_sources(corpus, recipe=recipe, pack_length=64), finished)
    message = str(caught.value)
    assert "data.recipe.max_sequence_length: prepared with 64, this run has 32" in message
    assert "data.pack_length: prepared with 128, this run has 64" in message
    assert "data.sources" not in message
    assert f"Choose another data.prepared_dir (or run.output_dir), or remove {finished}" in message


def test_a_changed_section_is_refused_while_unfinished_too(
    own_corpus: Path, tmp_path: Path, small_batches: None
) -> None:
    directory = tmp_path / "data"
    with pytest.raises(Stop):
        prepare(two_sources(own_corpus), directory, progress=StopAfter(5))
    before = contents(directory)
    with pytest.raises(DataError, match="data.tokenizer.vocabulary_size: prepared with 320, this run has 300"):
        prepare(two_sources(own_corpus, tokenizer={"kind": "train", "vocabulary_size": 300}), directory)
    write_jsonl(own_corpus / "code.jsonl", sentences(151, seed=2))
    with pytest.raises(DataError, match=r"input file .*code\.jsonl has changed since"):
        prepare(two_sources(own_corpus), directory)
    assert contents(directory) == before


def test_a_half_written_source_is_not_gone_on_with_from_another_text(
    own_corpus: Path, corpus: Path, tmp_path: Path, small_batches: None
) -> None:
    directory, saved = tmp_path / "data", tmp_path / "tokenizer"
    train_tokenizer(TrainedTokenizer(kind="train", vocabulary_size=300), sentences(50, seed=9)).save(saved)
    tokenizer = {"kind": "hub", "name": str(saved)}
    with pytest.raises(Stop):
        prepare(two_sources(own_corpus, tokenizer=tokenizer), directory, progress=StopAfter(5))
    before = contents(directory)
    os.utime(own_corpus / "wiki.jsonl", ns=(1, 1))
    with pytest.raises(DataError, match=r"wiki\.jsonl has changed since .*sources/wiki was prepared from it"):
        prepare(two_sources(own_corpus, tokenizer=tokenizer), directory)
    with pytest.raises(DataError, match=r"data\.sources\.wiki\.path: prepared with"):
        prepare(two_sources(corpus, tokenizer=tokenizer), directory)
    train_tokenizer(TrainedTokenizer(kind="train", vocabulary_size=300), sentences(50, seed=8)).save(saved)
    shutil.copystat(corpus / "wiki.jsonl", own_corpus / "wiki.jsonl")
    with pytest.raises(DataError, match=r"data\.tokenizer\.checksum: prepared with"):
        prepare(two_sources(own_corpus, tokenizer=tokenizer), directory)
    assert {name: content for name, content in contents(directory).items() if "tokenizer/" not in name} == {
        name: content for name, content in before.items() if "tokenizer/" not in name
    }


def test_a_changed_input_file_is_refused_when_finished_and_a_missing_one_is_not_missed(
    own_corpus: Path, tmp_path: Path
) -> None:
    config, directory = two_sources(own_corpus), tmp_path / "data"
    prepare(config, directory)
    path = own_corpus / "code.jsonl"
    os.utime(path, ns=(1, 1))
    with pytest.raises(DataError, match=r"code\.jsonl has changed since .*\n.*now \d+ bytes, modified at 0\.000000"):
        prepare(config, directory)
    path.unlink()
    prepare(config, directory)


def test_a_recipe_may_change_before_the_directory_is_finished(corpus: Path, tmp_path: Path) -> None:
    directory = tmp_path / "data"
    strict = {"kind": "documents", "max_sequence_length": 64, "long_documents": "error"}
    with pytest.raises(DataError, match="recipe.long_documents is 'error'"):
        prepare(two_sources(corpus, recipe=strict), directory)
    recorder = Recorder()
    prepare(two_sources(corpus), directory, progress=recorder)
    first = next(state for state in recorder.states if state.source == "wiki")
    assert first.bytes_read == first.bytes_resumed == first.total_bytes, "the tokens were kept"


def test_a_source_that_the_run_does_not_have_is_not_left_lying(corpus: Path, tmp_path: Path) -> None:
    directory = tmp_path / "data"
    tokenizer = tmp_path / "tokenizer"
    train_tokenizer(TrainedTokenizer(kind="train", vocabulary_size=300), sentences(50, seed=9)).save(tokenizer)
    config = two_sources(corpus, tokenizer={"kind": "hub", "name": str(tokenizer)})
    with pytest.raises(Stop):
        prepare(config, directory, progress=StopAfter(2))
    with pytest.raises(DataError, match="sources/code was begun by an interrupted call"):
        prepare(config.model_copy(update={"sources": {"wiki": config.sources["wiki"]}}), directory)


# Wrong sources


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
    directory, saved = tmp_path / "data", tmp_path / "tokenizer"
    train_tokenizer(TrainedTokenizer(kind="train", vocabulary_size=300), sentences(50, seed=9)).save(saved)
    config = two_sources(own_corpus, tokenizer={"kind": "hub", "name": str(saved)})
    whole = (own_corpus / "code.jsonl").read_text()
    (own_corpus / "code.jsonl").write_text(whole + '{"body": "x"}\n')
    with pytest.raises(DataError, match=r"code\.jsonl, line 151: no key 'text'; the keys there are: 'body'"):
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
    import tokenizers
    from tokenizers import models, pre_tokenizers

    backend = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "cat": 1, "<end>": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    Tokenizer(backend, end_of_text="<end>", unknown="[UNK]").save(tmp_path / "words")
    (tmp_path / "wiki.jsonl").write_text(text)
    config = data_config(
        {"wiki": {"kind": "jsonl", "path": tmp_path / "wiki.jsonl"}},
        tokenizer={"kind": "hub", "name": str(tmp_path / "words")},
        recipe={"kind": "documents", "max_sequence_length": 64, "minimum_document_length": 3},
    )
    with pytest.raises(DataError, match=message):
        prepare(config, tmp_path / "data")
    assert not (tmp_path / "data" / "manifest.json").exists()
    assert (tmp_path / "data").exists() == ("train" in message)


def test_what_can_be_known_before_is_refused_before_anything_is_made(corpus: Path, tmp_path: Path) -> None:
    directory = tmp_path / "data"
    missing = {"wiki": {"kind": "jsonl", "path": tmp_path / "missing.jsonl"}}
    with pytest.raises(DataError, match=r"data\.sources\.wiki\.path=FILE"):
        prepare(data_config(missing), directory)
    with pytest.raises(DataError, match="tokenizer folder"):
        prepare(two_sources(corpus, tokenizer={"kind": "gpt2", "path": tmp_path / "nowhere"}), directory)
    with pytest.raises(PackingError, match="did you mean 'longest_pack_first'"):
        prepare(two_sources(corpus, packing={"algorithm": "longest_pack"}), directory)
    assert not directory.exists()


def test_a_folder_with_other_files_is_not_prepared(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(DataError, match="'thesis.tex' first of 1"):
        prepare(two_sources(corpus), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_no_thread_outlives_a_call_that_failed(own_corpus: Path, tmp_path: Path, small_batches: None) -> None:
    (own_corpus / "code.jsonl").write_text("broken\n")
    with pytest.raises(DataError):
        prepare(two_sources(own_corpus), tmp_path / "data")
    names = {thread.name for thread in threading.enumerate()}
    assert not {name for name in names if name.startswith(("reader", "encoder"))}


# One at a time, and full disks


def test_a_second_call_at_the_same_time_is_told(corpus: Path, tmp_path: Path) -> None:
    config, directory = two_sources(corpus), tmp_path / "data"
    refusals = []

    class Intruder(Recorder):
        def update(self, state: PrepareState) -> None:
            with pytest.raises(DataError, match="is being prepared by another process") as caught:
                prepare(config, directory)
            refusals.append(caught.value)

    prepare(config, directory, progress=Intruder())
    assert len(refusals) >= 4
    assert not (directory / ".prepare.lock").exists()


_LIMITED = """
import resource, signal, sys
from pathlib import Path
from evenpack.data import tokenise
from evenpack.data.data_config import DataConfig
from evenpack.data.prepare import prepare
from evenpack.errors import DataError

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
tokenise.BATCH_TEXT_BYTES, tokenise.COMMIT_SECONDS = 4_000, 0.0
try:
    prepare(DataConfig.model_validate_json(sys.argv[1]), Path(sys.argv[2]))
except DataError as error:
    print(error)
"""


def test_a_file_that_cannot_grow_is_explained_and_gone_on_with(corpus: Path, finished: Path, tmp_path: Path) -> None:
    config, directory = two_sources(corpus), tmp_path / "data"
    arguments = [config.model_dump_json(), str(directory), "40000"]
    run = subprocess.run([sys.executable, "-c", _LIMITED, *arguments], capture_output=True, text=True, check=True)
    assert "File too large" in run.stdout
    assert "bytes; needed: about " in run.stdout
    assert "run the same command again" in run.stdout
    journal = json.loads((directory / "sources" / "wiki" / "tokens.journal.json").read_text())
    assert 0 < journal["documents"] < 451
    recorder = Recorder()
    prepare(config, directory, progress=recorder)
    assert recorder.states[0].bytes_resumed > 0
    assert contents(directory) == contents(finished)


@pytest.mark.parametrize("stage", ["store_plan", "write_tokens"])
def test_a_full_disk_says_what_is_free_and_what_is_needed(
    stage: str, corpus: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, directory = two_sources(corpus), tmp_path / "data"

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patch:
        patch.setattr(prepare_source, stage, fail)
        with pytest.raises(DataError, match=r"No space left on device.*Free on its disk: [\d,]+ bytes; needed: "):
            prepare(config, directory)
    assert not (directory / "manifest.json").exists()
    prepare(config, directory)
    assert contents(directory) == contents(finished)


# Token files that come ready made


def megatron(prefix: Path, *, end: int = 9, last: int = 9, vocabulary_size: int = 10) -> Path:
    """Sixty documents of 2 to 21 tokens below 9, all but the last ended by `end`."""
    random = np.random.default_rng(5)
    lengths = random.integers(2, 22, 60)
    tokens = random.integers(0, 9, lengths.sum())
    tokens[np.cumsum(lengths) - 1] = end
    tokens[-1] = last
    with TokenFileWriter(prefix, vocabulary_size=vocabulary_size) as writer:
        writer.append(tokens, lengths, np.arange(60, dtype=np.uint64))
        writer.finish()
    return prefix


def megatron_config(prefix: Path | None, vocabulary_size: int = 10, **source: Any) -> DataConfig:
    return data_config(
        {"ready": {"kind": "megatron", "path": prefix, **source}},
        tokenizer={"kind": "external", "vocabulary_size": vocabulary_size, "end_of_text_id": 9},
    )


def test_a_ready_made_token_file_is_used_where_it_lies(tmp_path: Path) -> None:
    config = megatron_config(megatron(tmp_path / "ready"))
    before = contents(tmp_path)
    manifest = prepare(config, tmp_path / "data")
    assert not list((tmp_path / "data").rglob("*.bin"))
    assert not (tmp_path / "data" / "tokenizer").exists()
    assert manifest.sources["ready"].documents == 60
    prepared = PreparedData.open(tmp_path / "data", config)
    assert (prepared.vocabulary_size, prepared.end_of_text_id) == (10, 9)
    ids = np.arange(prepared.view("ready", "train").count)
    tokens = prepared.view("ready", "train").gather(ids)
    assert (tokens == 9).sum() == len(ids) > 40
    assert {name: content for name, content in contents(tmp_path).items() if not name.startswith("data/")} == before
    with (tmp_path / "ready.bin").open("ab") as file:
        file.write(b"xx")
    with pytest.raises(DataError, match=r"ready\.bin: expected \d+ bytes, found \d+"):
        PreparedData.open(tmp_path / "data", config)


def test_equal_ready_made_documents_stay_on_one_side(tmp_path: Path) -> None:
    with TokenFileWriter(tmp_path / "ready", vocabulary_size=10) as writer:
        tokens = np.tile(np.concatenate([np.array([n % 9, n // 9, 9]) for n in range(80)]), 2)
        writer.append(tokens, np.full(160, 3), np.arange(160, dtype=np.uint64))
        writer.finish()
    prepare(
        megatron_config(tmp_path / "ready", validation_fraction=0.5) if False else _halved(tmp_path), tmp_path / "data"
    )
    validation = set(np.load(tmp_path / "data" / "sources" / "ready" / "validation" / "documents.npy").tolist())
    assert 20 < len(validation) < 140
    assert {(n + 80) % 160 for n in validation} == validation


def _halved(folder: Path) -> DataConfig:
    return megatron_config(folder / "ready").model_copy(update={"validation_fraction": 0.5})


def test_wrong_ready_made_token_files_are_refused(tmp_path: Path) -> None:
    def refusal(config: DataConfig) -> str:
        with pytest.raises(DataError) as caught:
            prepare(config, tmp_path / "data")
        assert not (tmp_path / "data").exists()
        return str(caught.value)

    good = megatron(tmp_path / "good")
    unended = megatron(tmp_path / "unended", last=3)
    assert "data.sources.ready.path=PREFIX" in refusal(megatron_config(None))
    assert "without '.bin' or '.idx'" in refusal(megatron_config(tmp_path / "good.bin"))
    assert "1 of 60 documents" in refusal(megatron_config(unended))
    assert "document 59 first" in refusal(megatron_config(unended))
    too_large = megatron_config(megatron(tmp_path / "large", last=500, vocabulary_size=600), require_end_of_text=False)
    assert "holds token id 500, but the vocabulary has 10 entries" in refusal(too_large)
    assert "end_of_text_id (9) is outside the vocabulary of 5" in refusal(megatron_config(good, 5))
    with good.with_suffix(".bin").open("r+b") as file:
        file.truncate(100)
    assert "truncated" in refusal(megatron_config(good))
    prepare(megatron_config(unended, require_end_of_text=False), tmp_path / "data")
