"""`prepare` with sentence pairs writes the same files for any number of threads and after any interruption."""

import os
import pickle
import re
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prepared_files import (
    Recorder,
    StopAfter,
    StoppedError,
    contents,
    data_config,
    save_tokenizer,
    sentence_documents,
    write_jsonl,
)

from evenpack.data.config import DataConfig
from evenpack.data.manifest import Manifest
from evenpack.data.prepare import pairs as prepare_pairs
from evenpack.data.prepare import tokenising
from evenpack.data.prepare.prepare import prepare
from evenpack.data.prepared import PreparedData
from evenpack.data.sequences import SentencePairsView
from evenpack.data.sequences.pair_drawing import SentenceIndex
from evenpack.data.tokens import writer as token_writer
from evenpack.data.tokens.file import TokenFile
from evenpack.errors import DataError

LONGEST = 48
DOCUMENTS = 300


def pairs_config(corpus: Path, **changes: Any) -> DataConfig:
    recipe = {"kind": "sentence_pairs", "max_sequence_length": LONGEST, "duplication_factor": 3, "seed": 5}
    values = {
        "tokenizer": {"kind": "train_word_pieces", "vocabulary_size": 150},
        "recipe": {**recipe, **changes.pop("recipe", {})},
        "pack_length": 64,
    }
    return data_config({"wiki": {"kind": "jsonl", "path": corpus}}, **{**values, **changes})


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("text") / "wiki.jsonl", ["", *sentence_documents(DOCUMENTS, seed=1)])


@pytest.fixture(scope="module")
def made(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepares without interruption; tests must not change the result."""
    directory = tmp_path_factory.mktemp("made") / "data"
    prepare(pairs_config(text_file), directory)
    return directory


def view_of(directory: Path, config: DataConfig, split: str = "train") -> SentencePairsView:
    view = PreparedData.open(directory, config).view("wiki", split)  # type: ignore[arg-type]
    assert isinstance(view, SentencePairsView)
    return view


def texts_of_split(directory: Path, split: str) -> list[list[int]]:
    """Returns the tokens of each document of a split, without end-of-text."""
    token_file = TokenFile(directory / "sources" / "wiki" / "tokens")
    hashes = np.load(directory / "sources" / "wiki" / "document_hashes.npy")
    offsets = token_file.document_offsets.tolist()
    is_held_out = held_out_by_hand(hashes)
    chosen = np.flatnonzero(is_held_out if split == "validation" else ~is_held_out)
    return [token_file.read(offsets[i], offsets[i + 1] - 1).tolist() for i in chosen]


def held_out_by_hand(hashes: np.ndarray) -> np.ndarray:
    from evenpack.data.sources.config import BuiltinSource
    from evenpack.data.sources.kinds import held_out

    return held_out(hashes, BuiltinSource(kind="builtin"), 0.1)


def find(segment: list[int], documents: list[str]) -> set[tuple[int, int]]:
    """Returns (document, character) wherever the tokens occur."""
    needle = as_text(segment)
    return {(number, match.start()) for number, text in enumerate(documents) for match in re.finditer(needle, text)}


def as_text(tokens: list[int]) -> str:
    """Returns one character per token."""
    return re.escape("".join(chr(0x4E00 + token) for token in tokens))


@pytest.mark.parametrize("split", ["train", "validation"])
def test_pairs_are_neighbouring_text_of_a_document_of_the_split_or_of_two(
    made: Path, text_file: Path, split: str
) -> None:
    prepared = PreparedData.open(made, pairs_config(text_file))
    view, ids = view_of(made, pairs_config(text_file), split), prepared.tokenizer.pair_tokens
    documents = ["".join(chr(0x4E00 + token) for token in text) for text in texts_of_split(made, split)]
    foreign = "validation" if split == "train" else "train"
    foreign_documents = ["".join(chr(0x4E00 + token) for token in text) for text in texts_of_split(made, foreign)]
    assert view.count > (300 if split == "train" else 30)
    followed = long_ones = 0
    for number in np.linspace(0, view.count - 1, 150 if split == "train" else 60).astype(int):
        tokens = view.read(np.array([number])).tokens.tolist()
        bound = int(view.first_segment_lengths[number])
        assert 5 <= len(tokens) <= LONGEST
        assert tokens[0] == ids.classification_id
        assert tokens[bound - 1] == tokens[-1] == ids.separator_id
        first, second = tokens[1 : bound - 1], tokens[bound:-1]
        assert first
        assert second
        assert not {ids.classification_id, ids.separator_id, ids.mask_id} & set(first + second)
        places, second_places = find(first, documents), find(second, documents)
        assert places
        assert second_places
        if view.next_sentence_labels[number] == 0:
            followed += 1
            assert any(
                second_document == document and place >= start + len(first)
                for document, start in places
                for second_document, place in second_places
            )
        else:
            assert {document for document, _ in places} != {document for document, _ in second_places} or len(
                places
            ) > 1
        for segment in (first, second):
            if len(segment) >= 15:
                long_ones += 1
                assert not find(segment, foreign_documents)
    assert followed > 15
    assert long_ones > 30


def test_lengths_plans_and_packs_work_as_for_any_sequences(made: Path, text_file: Path) -> None:
    config = pairs_config(text_file)
    prepared = PreparedData.open(made, config)
    for split in ("train", "validation"):
        view = view_of(made, config, split)
        plan = prepared.plan("wiki", split, seed=3)  # type: ignore[arg-type]
        drawn = plan.draw(np.arange(plan.packs))
        assert sorted(drawn.sequence_ids.tolist()) == list(range(view.count))
        np.testing.assert_array_equal(drawn.lengths, view.lengths()[drawn.sequence_ids])
        ids = drawn.sequence_ids[:50]
        content = view.read(ids)
        np.testing.assert_array_equal(content.counts.segment_lengths, drawn.lengths[:50])
        np.testing.assert_array_equal(content.counts.segments, 1)
        assert len(content.tokens) == drawn.lengths[:50].sum()
        again = pickle.loads(pickle.dumps(view))
        np.testing.assert_array_equal(again.read(ids).tokens, view.read(ids).tokens)
        np.testing.assert_array_equal(again.next_sentence_labels, view.next_sentence_labels)
        with pytest.raises(IndexError):
            view.read(np.array([view.count]))


def test_the_lengths_of_some_pairs_take_memory_for_those_alone(made: Path, text_file: Path) -> None:
    view = view_of(made, pairs_config(text_file), "train")
    view.lengths(0, 1)  # what is imported or mapped once
    tracemalloc.start()
    try:
        found = view.lengths(7, 17)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert most < 8 * view.count  # one number for each pair
    assert found.tolist() == view.lengths().tolist()[7:17]


def test_the_ledger_accounts_for_every_token(made: Path, text_file: Path) -> None:
    record = Manifest.read(made).sources["wiki"]
    token_file = TokenFile(made / "sources" / "wiki" / "tokens")
    assert record.documents == DOCUMENTS + 1
    held_out = held_out_by_hand(np.load(made / "sources" / "wiki" / "document_hashes.npy"))
    empty_held_out = bool(held_out[0])
    for split, passes, chosen in (("train", 3, ~held_out), ("validation", 1, held_out)):
        accounting, view = getattr(record, split).accounting, view_of(made, pairs_config(text_file), split)
        assert accounting.passes == passes
        assert accounting.tokens_read == token_file.document_lengths()[chosen].sum()
        assert accounting.documents_too_short == int(empty_held_out == (split == "validation"))
        assert accounting.tokens_kept == view.lengths().sum() == TokenFile(made / f"sources/wiki/{split}/pairs").tokens
        assert accounting.tokens_special == 3 * view.count == 3 * accounting.sequences
        assert accounting.tokens_borrowed > accounting.tokens_cut > 0
        random = view.next_sentence_labels == 1
        second = view.lengths() - view.first_segment_lengths - 1
        assert second[random].sum() <= accounting.tokens_borrowed
        own = view.lengths().sum() - 3 * view.count - second[random].sum()
        text = token_file.document_lengths()[chosen].sum() - chosen.sum()
        lost = passes * text - own
        borrowed_and_cut = accounting.tokens_borrowed - second[random].sum()
        assert lost + borrowed_and_cut == accounting.tokens_cut


def test_each_pass_draws_again_and_validation_has_one_pass(made: Path, text_file: Path, tmp_path: Path) -> None:
    config = pairs_config(text_file, recipe={"duplication_factor": 1})
    prepare(config, tmp_path / "once")
    once, thrice = view_of(tmp_path / "once", config), view_of(made, pairs_config(text_file))
    tokens = thrice.read(np.arange(thrice.count)).tokens
    first_pass = once.read(np.arange(once.count)).tokens
    np.testing.assert_array_equal(tokens[: len(first_pass)], first_pass)
    assert 2.7 < thrice.count / once.count < 3.3
    assert not np.array_equal(tokens[len(first_pass) : 2 * len(first_pass)], first_pass)
    for name in ("pairs.bin", "next_sentence_labels.npy"):
        path = Path("sources/wiki/validation") / name
        assert (made / path).read_bytes() == (tmp_path / "once" / path).read_bytes()
    other = pairs_config(text_file, recipe={"seed": 6})
    prepare(other, tmp_path / "other")
    pairs, others = (one.read(np.arange(500)).tokens for one in (thrice, view_of(tmp_path / "other", other)))
    assert not np.array_equal(pairs, others)
    fingerprints = {
        PreparedData.open(folder, section).fingerprint(1)
        for folder, section in [
            (made, pairs_config(text_file)),
            (tmp_path / "once", config),
            (tmp_path / "other", other),
        ]
    }
    assert len(fingerprints) == 3


@pytest.mark.parametrize("processors", [1, 2, 5])
def test_neither_blocks_nor_threads_show(
    made: Path, text_file: Path, tmp_path: Path, processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_pairs, "BLOCK_SENTENCES", 100)
    monkeypatch.setattr(prepare_pairs, "_COPIED_PAIRS", 7)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(processors)))
    recorder = Recorder()
    prepare(pairs_config(text_file), tmp_path / "data", progress=recorder)
    states = [state for state in recorder.states if state.stage == "pairs"]
    assert len(states) > 30
    for state in (next(s for s in states[::-1] if s.total_bytes == states[0].total_bytes), states[-1]):
        assert state.bytes_read == state.total_bytes
    assert contents(tmp_path / "data") == contents(made)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_pairs, "BLOCK_SENTENCES", 100)
    monkeypatch.setattr(token_writer, "COMMIT_SECONDS", 0.0)


def test_interrupted_pairs_are_gone_on_with(
    text_file: Path, tmp_path: Path, small_blocks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Recorder()
    prepare(pairs_config(text_file), tmp_path / "whole", progress=whole)
    totals = [state.total_bytes for state in whole.states if state.stage == "pairs"]
    first_of_validation = totals.index(totals[-1])
    assert len(totals) - first_of_validation > 1
    # Within two passes over training documents; and within validation, where the next version has other blocks.
    for reports, block_sentences in ((10, 100), (30, 100), (first_of_validation + 2, 70)):
        directory = tmp_path / str(reports)
        with pytest.raises(StoppedError):
            prepare(pairs_config(text_file), directory, progress=StopAfter(reports, stage="pairs"))
        assert not (directory / "manifest.json").exists()
        monkeypatch.setattr(prepare_pairs, "BLOCK_SENTENCES", block_sentences)
        recorder = Recorder()
        prepare(pairs_config(text_file), directory, progress=recorder)
        resumed = [state for state in recorder.states if state.stage == "pairs"]
        assert resumed[0].bytes_resumed > 0
        if block_sentences == 100:
            assert len(resumed) == len(totals) - reports
        assert contents(directory) == contents(tmp_path / "whole")


def test_pairs_of_another_recipe_are_not_continued(text_file: Path, tmp_path: Path, small_blocks: None) -> None:
    other = pairs_config(text_file, recipe={"seed": 6})
    prepare(other, tmp_path / "whole")
    with pytest.raises(StoppedError):
        prepare(pairs_config(text_file), tmp_path / "data", progress=StopAfter(10, stage="pairs"))
    prepare(other, tmp_path / "data")
    assert contents(tmp_path / "data") == contents(tmp_path / "whole")


_KILLED = """
import os, signal, sys
from pathlib import Path
from evenpack.data.prepare import pairs as prepare_pairs
from evenpack.data.tokens import writer as token_writer
from evenpack.data.config import DataConfig
from evenpack.data.prepare.prepare import prepare

left = int(sys.argv[3])
flush = os.fsync
def kill_at(descriptor):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    flush(descriptor)

os.fsync = kill_at
prepare_pairs.BLOCK_SENTENCES, token_writer.COMMIT_SECONDS = 400, 0.0
prepare(DataConfig.model_validate_json(sys.argv[1]), Path(sys.argv[2]))
"""


@pytest.mark.slow
def test_pairs_killed_again_and_again_end_up_byte_for_byte_the_same(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_pairs, "BLOCK_SENTENCES", 400)
    config, directory = pairs_config(text_file), tmp_path / "data"
    prepare(config, tmp_path / "whole")
    killed = []
    for flushes in (60, 45, 20, 80, 10_000):
        arguments = [config.model_dump_json(), str(directory), str(flushes)]
        status = subprocess.run([sys.executable, "-c", _KILLED, *arguments], check=False).returncode
        if status == 0:
            break
        assert status == -signal.SIGKILL
        assert not (directory / "manifest.json").exists()
        killed.append({path.relative_to(directory).as_posix() for path in directory.rglob("*")})
    assert len(killed) >= 4
    assert any("sources/wiki/train/pairs.bin.partial" in names for names in killed), "killed within pairs"
    assert any("sources/wiki/train/packing.json" in names for names in killed), "killed between the splits"
    assert contents(directory) == contents(tmp_path / "whole")


def test_documents_of_one_sentence_follow_the_policy(tmp_path: Path) -> None:
    texts = sentence_documents(60, seed=3) + [f"Only {word} here." for word in ("one", "two", "three", "four")]
    corpus = write_jsonl(tmp_path / "wiki.jsonl", texts)
    accounts = {}
    for policy in ("random_next", "drop"):
        config = pairs_config(corpus, recipe={"single_sentence_documents": policy}, validation_fraction=0.0)
        accounts[policy] = prepare(config, tmp_path / policy).sources["wiki"].train.accounting
    single = accounts["drop"].documents_single_sentence
    assert 4 <= single < 20
    assert accounts["drop"].documents_kept + single == accounts["random_next"].documents_kept == 64
    assert accounts["drop"].tokens_dropped == 3 * accounts["drop"].tokens_single_sentence > 3 * 4 * single
    assert accounts["drop"].tokens_document_ends == 64 - single
    assert accounts["random_next"].tokens_dropped == 0
    index = SentenceIndex.open(TokenFile(tmp_path / "drop/sources/wiki/tokens"))
    is_single = np.diff(index.first_sentences) == 1
    assert is_single.sum() == single
    config = pairs_config(corpus, recipe={"single_sentence_documents": "drop"}, validation_fraction=0.0)
    random = view_of(tmp_path / "random_next", pairs_config(corpus, validation_fraction=0.0))
    assert view_of(tmp_path / "drop", config).count <= random.count - 3 * single
    config = pairs_config(corpus, recipe={"single_sentence_documents": "error"}, validation_fraction=0.0)
    first = int(np.argmax(is_single))
    with pytest.raises(DataError, match=rf"source 'wiki': document {first} is the first of {single} with one sentence"):
        prepare(config, tmp_path / "error")


def test_what_no_pairs_can_be_made_of_is_refused(tmp_path: Path) -> None:
    alone = write_jsonl(tmp_path / "alone.jsonl", ["One sentence. Another one.", ""])
    with pytest.raises(DataError, match="of 2 documents of a split only one can be made into pairs"):
        prepare(pairs_config(alone, validation_fraction=0.0), tmp_path / "alone")
    single = write_jsonl(tmp_path / "single.jsonl", ["One sentence.", "Another one."])
    config = pairs_config(single, recipe={"single_sentence_documents": "drop"}, validation_fraction=0.0)
    with pytest.raises(DataError, match=r"leaves no sequence to train on: .* 2 of a single sentence"):
        prepare(config, tmp_path / "single")


def test_a_vocabulary_without_the_special_tokens_is_refused_before_anything_is_read(
    text_file: Path, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=r"set data\.tokenizer\.kind=train_word_pieces"):
        prepare(pairs_config(text_file, tokenizer={"kind": "train"}), tmp_path / "data")
    byte_level = save_tokenizer(tmp_path / "tokenizer")
    with pytest.raises(DataError, match=r"has no \[CLS\], \[SEP\], \[MASK\], which sentence pairs"):
        prepare(pairs_config(text_file, tokenizer=byte_level), tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_a_token_file_without_sentences_is_not_mistaken_for_one_with_them(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenising, "BATCH_TEXT_BYTES", 4000)
    monkeypatch.setattr(token_writer, "COMMIT_SECONDS", 0.0)

    class StopAtTokens(Recorder):
        def update(self, state: Any) -> None:
            super().update(state)
            if state.stage == "tokens" and len(self.states) > 20:
                raise StoppedError

    documents = pairs_config(text_file).model_copy(update={"recipe": data_config({"a": {"kind": "builtin"}}).recipe})
    with pytest.raises(StoppedError):
        prepare(documents, tmp_path / "data", progress=StopAtTokens())
    with pytest.raises(DataError, match=r"data\.recipe\.language: prepared with 'nothing', this run has 'en'"):
        prepare(pairs_config(text_file), tmp_path / "data")


@pytest.mark.parametrize(("language", "is_told"), [("en", False), ("zz", True)])
def test_a_language_whose_sentences_follow_the_rules_of_another_is_reported(text_file, tmp_path, language, is_told):
    progress = Recorder()
    prepare(pairs_config(text_file, recipe={"language": language}), tmp_path / "data", progress=progress)
    told = [note for note in progress.notes if "data.recipe.language zz: sentencex has no rules for it" in note]
    assert bool(told) == is_told
