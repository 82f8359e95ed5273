"""BERT's vocabularies are read, trained and saved, and incomplete ones are refused."""

import logging
from pathlib import Path

import numpy as np
import pytest
from prepared_files import sentences
from pydantic import ValidationError
from transformers import BertTokenizer

from evenpack.data.sequences.pair_drawing import split_sentences
from evenpack.data.tokenizers import config as tokenizers_config
from evenpack.data.tokenizers.config import TrainedWordPieces
from evenpack.data.tokenizers.loading import load_tokenizer, tokenizer_inputs, train_tokenizer
from evenpack.data.tokenizers.special_tokens import SENTENCE_LENGTHS
from evenpack.data.tokenizers.tokenizer import Tokenizer
from evenpack.errors import DataError

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PIECES = ["the", "cat", "##s", "sat", "on", "mat", ".", ",", "un", "##known", "na", "##ive", "[", "]", "sep", "!"]
TEXTS = ["The cats sat on the mat.", "", "Unknown, naïve [SEP] cat!", "字 the\n\n  cat zebra"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Writes a small uncased vocabulary."""
    (tmp_path / "bert").mkdir()
    write_vocabulary(tmp_path / "bert", [*SPECIAL, *PIECES])
    return tmp_path / "bert"


def write_vocabulary(folder: Path, entries: list[str]) -> None:
    (folder / "vocab.txt").write_text("".join(f"{entry}\n" for entry in entries), encoding="utf-8")


def from_files(folder: Path | None, **changes: object) -> Tokenizer:
    return load_tokenizer(tokenizers_config.BertTokenizer.model_validate({"kind": "bert", "path": folder, **changes}))


def documents(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    encoded = tokenizer.encode_batch(texts)
    return [part.tolist() for part in np.split(encoded.tokens, np.cumsum(encoded.lengths))[:-1]]


def test_text_is_encoded_as_transformers_encodes_it_and_special_tokens_stay_text(folder: Path) -> None:
    reference = BertTokenizer.from_pretrained(folder)
    tokenizer = from_files(folder)
    # transformers reads [SEP] out of the text; here it is three tokens of text.
    plain = [text for text in TEXTS if "[SEP]" not in text]
    assert documents(tokenizer, plain) == [reference.encode(text) if text.strip() else [3] for text in plain]
    (found,) = documents(tokenizer, ["Unknown, naïve [SEP] cat!"])
    assert tokenizer.decode(found) == "[CLS] unknown, naive [ sep ] cat! [SEP]"
    assert found.count(3) == 1
    assert tokenizer.encode_batch(["zebra cat"]).unknown_tokens == 1
    assert tokenizer.vocabulary_size == len(SPECIAL) + len(PIECES)


def test_what_pairs_and_masks_need_is_known(folder: Path) -> None:
    tokenizer = from_files(folder)
    ids = tokenizer.pair_tokens
    assert (ids.classification_id, ids.separator_id, ids.mask_id) == (2, 3, 4)
    vocabulary = tokenizer.masking_vocabulary()
    assert vocabulary.mask_id == 4
    assert np.flatnonzero(vocabulary.special).tolist() == [0, 2, 3, 4]
    assert np.flatnonzero(vocabulary.continues).tolist() == [7, 14, 16]
    assert vocabulary.ordinary_ids.tolist() == [1, *range(5, 21)]


def test_sentences_are_encoded_apart_and_empty_ones_left_out(folder: Path) -> None:
    tokenizer = from_files(folder)
    texts = ["The cats sat. The mat!\n\nOn the mat.", "", " \n ", "cat"]
    split = [split_sentences(text, "en") for text in texts]
    assert ["".join(sentences) for sentences in split] == texts
    encoded = tokenizer.encode_sentences(split)
    whole = tokenizer.encode_batch(texts)
    start = tokenizer.pair_tokens.classification_id
    np.testing.assert_array_equal(encoded.tokens, whole.tokens[whole.tokens != start])
    np.testing.assert_array_equal(whole.lengths - encoded.lengths, [1, 0, 0, 1])
    assert encoded.lengths.tolist() == [13, 1, 1, 2]
    assert encoded.columns[SENTENCE_LENGTHS].tolist() == [5, 3, 4, 1]
    assert whole.columns == {}


def test_abbreviations_do_not_end_a_sentence() -> None:
    text = "Dr. Smith came at 3.5 p.m. to Washington. He left, e.g. for lunch!"
    assert split_sentences(text, "en") == ["Dr. Smith came at 3.5 p.m. to Washington. ", "He left, e.g. for lunch!"]


@pytest.mark.parametrize("missing", SPECIAL)
def test_a_vocabulary_that_lacks_a_special_token_is_refused(folder: Path, missing: str) -> None:
    write_vocabulary(folder, [entry for entry in [*SPECIAL, *PIECES] if entry != missing])
    with pytest.raises(DataError, match=rf"is not a BERT vocabulary: its 20 entries lack \[{missing[1:-1]}\]"):
        from_files(folder)


def test_a_folder_without_a_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no tokenizer\.json or vocab\.txt"):
        from_files(tmp_path)
    with pytest.raises(DataError, match="does not exist"):
        from_files(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"give data\.tokenizer\.path=FOLDER"):
        from_files(None)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json holds no readable tokenizer"):
        from_files(tmp_path)
    with pytest.raises(ValidationError, match="path and name exclude each other"):
        tokenizers_config.BertTokenizer(kind="bert", path=tmp_path, name="bert")


def test_letters_that_contradict_the_case_are_refused(folder: Path) -> None:
    with pytest.raises(DataError, match=r"has no capital letter, and data\.tokenizer\.lower_case is false"):
        from_files(folder, lower_case=False)
    write_vocabulary(folder, [*SPECIAL, *PIECES, "Cat"])
    with pytest.raises(DataError, match=r"has capital letters \('Cat' first\), and .*lower_case is true"):
        from_files(folder)
    assert documents(from_files(folder, lower_case=False), ["Cat cat"]) == [[2, 21, 6, 3]]


def test_the_inputs_are_the_file_that_is_read(folder: Path, tmp_path: Path) -> None:
    config = tokenizers_config.BertTokenizer(kind="bert", path=folder)
    assert [Path(file.path).name for file in tokenizer_inputs(config)] == ["vocab.txt"]
    from_files(folder).save(tmp_path / "saved")
    config = tokenizers_config.BertTokenizer(kind="bert", path=tmp_path / "saved")
    assert [Path(file.path).name for file in tokenizer_inputs(config)] == ["tokenizer.json"]
    assert tokenizer_inputs(tokenizers_config.BertTokenizer(kind="bert", name="bert-base-uncased")) == ()


def test_a_vocabulary_is_trained_that_knows_its_text(caplog: pytest.LogCaptureFixture) -> None:
    texts = sentences(80, seed=9)
    config = TrainedWordPieces(kind="train_word_pieces", vocabulary_size=200)
    trained = train_tokenizer(config, texts)
    assert trained.pair_tokens.separator_id == trained.end_of_text_id == 3
    encoded = trained.encode_batch(texts)
    assert encoded.unknown_tokens == 0
    assert len(encoded.tokens) < sum(map(len, texts)) / 2, "words are more than letters"
    assert trained.masking_vocabulary().continues.sum() > 20
    with caplog.at_level(logging.WARNING):
        assert train_tokenizer(config, ["ab ab"] * 3).vocabulary_size < 20
    assert "entries, fewer than 200" in caplog.text


@pytest.mark.slow
def test_rare_letters_of_other_scripts_do_not_take_the_vocabulary(caplog: pytest.LogCaptureFixture) -> None:
    rare = [chr(0x4E00 + n) for n in range(900)]
    texts = [*sentences(8000, seed=9), *rare]
    with caplog.at_level(logging.INFO):
        trained = train_tokenizer(TrainedWordPieces(kind="train_word_pieces", vocabulary_size=1200), texts)
    assert "different letters are entries of the vocabulary" in caplog.text
    pieces = trained.encode_batch(texts[:8000])
    assert pieces.unknown_tokens == 0
    assert trained.encode_batch(rare).unknown_tokens == 900 - (256 - len(set("".join(texts[:8000])) - {" "}))
    often = [*texts, *rare * 99]
    common = train_tokenizer(TrainedWordPieces(kind="train_word_pieces", vocabulary_size=2200), often)
    assert 99 * common.encode_batch(rare).unknown_tokens <= 0.0005 * sum(map(len, often)), "frequent ones are kept"


def test_what_no_vocabulary_can_be_trained_on_is_refused() -> None:
    config = TrainedWordPieces(kind="train_word_pieces", vocabulary_size=64)
    with pytest.raises(DataError, match="have 0 different letters to keep"):
        train_tokenizer(config, ["", " \n"])
    letters = "".join(chr(0x61 + n) for n in range(26)) + "0123456789"
    with pytest.raises(DataError, match=r"have 36 different letters to keep: .* needs more than 77 entries"):
        train_tokenizer(config, [letters])
