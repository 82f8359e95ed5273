"""`prepare` with sentence pairs writes the same files for any number of threads and after any interruption."""

import os
import re
from pathlib import Path

import numpy as np
import pytest
from prepared_files import (
    Recorder,
    ShownState,
    contents,
    data_config,
    interrupt,
    killed_at_flush,
    pairs_config,
    recorded,
    save_tokenizer,
    sentence_documents,
    write_jsonl,
)

from evenpack.data.config import DataConfig
from evenpack.data.manifest import Manifest
from evenpack.data.prepare import pairs as prepare_pairs
from evenpack.data.prepare.prepare import prepare
from evenpack.data.prepared import PreparedData
from evenpack.data.sequences import SentencePairsView
from evenpack.data.sequences.pair_drawing import SentenceIndex
from evenpack.data.tokens import writer as token_writer
from evenpack.data.tokens.file import TokenFile
from evenpack.errors import DataError

LONGEST = 48
DOCUMENTS = 200


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
        with pytest.raises(IndexError):
            view.read(np.array([view.count]))


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


@pytest.mark.parametrize("processors", [1, 5])
def test_neither_blocks_nor_threads_show(
    made: Path, text_file: Path, tmp_path: Path, processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_pairs, "BLOCK_SENTENCES", 100)
    monkeypatch.setattr(prepare_pairs, "_COPIED_PAIRS", 7)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(processors)))
    recorder = recorded(pairs_config(text_file), tmp_path / "data")
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
    made: Path, text_file: Path, tmp_path: Path, small_blocks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resumed_after(reports: int) -> list[ShownState]:
        interrupt(pairs_config(text_file), tmp_path / str(reports), reports, stage="pairs")
        assert not (tmp_path / str(reports) / "manifest.json").exists()
        monkeypatch.setattr(prepare_pairs, "BLOCK_SENTENCES", 70)  # as the next version might have it
        states = [
            one for one in recorded(pairs_config(text_file), tmp_path / str(reports)).states if one.stage == "pairs"
        ]
        assert states[0].bytes_resumed > 0
        assert contents(tmp_path / str(reports)) == contents(made)
        return states

    totals = [state.total_bytes for state in resumed_after(10)]
    first_of_validation = 10 + totals.index(totals[-1])
    assert len(totals) + 10 - first_of_validation > 1
    resumed_after(first_of_validation + 1)


@pytest.mark.slow
def test_pairs_killed_again_and_again_end_up_byte_for_byte_the_same(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_pairs, "BLOCK_SENTENCES", 400)
    config, directory = pairs_config(text_file), tmp_path / "data"
    prepare(config, tmp_path / "whole")
    killed = []
    for flushes in (60, 45, 20, 80, 10_000):
        if not killed_at_flush(flushes, config, directory):
            break
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
    text_file: Path, tmp_path: Path, small_batches: None
) -> None:
    documents = pairs_config(text_file).model_copy(update={"recipe": data_config({"a": {"kind": "builtin"}}).recipe})
    interrupt(documents, tmp_path / "data", 5)
    with pytest.raises(DataError, match=r"data\.recipe\.language: prepared with 'nothing', this run has 'en'"):
        prepare(pairs_config(text_file), tmp_path / "data")


@pytest.mark.parametrize(("language", "is_told"), [("en", False), ("zz", True)])
def test_a_language_whose_sentences_follow_the_rules_of_another_is_reported(text_file, tmp_path, language, is_told):
    progress = Recorder()
    prepare(pairs_config(text_file, recipe={"language": language}), tmp_path / "data", progress=progress)
    told = [note for note in progress.notes if "data.recipe.language zz: sentencex has no rules for it" in note]
    assert bool(told) == is_told
