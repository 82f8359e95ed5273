"""Texts become tokens with their ends, and an incomplete vocabulary is refused."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizer_folders import FAST, Folder, byte_pairs, whole_words
from tokenizers import models
from transformers import AutoTokenizer, GPT2Tokenizer

from evenpack.data.tokenizers.byte_pairs import END_OF_TEXT
from evenpack.data.tokenizers.config import (
    BertTokenizer,
    Gpt2Tokenizer,
    HubTokenizer,
    TrainedTokenizer,
    TrainedWordPieces,
)
from evenpack.data.tokenizers.loading import load_tokenizer, train_tokenizer
from evenpack.data.tokenizers.special_tokens import SENTENCE_LENGTHS
from evenpack.data.tokenizers.tokenizer import Tokenizer
from evenpack.errors import DataError

TEXTS = [
    "the cat sat on the mat, and the cat slept",
    "",
    "naïve café: 漢字 🙂\n\n  tabs\tand spaces  ",
    "it's 2,024 o'clock",
]


@pytest.fixture(scope="module")
def gpt2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a small vocabulary in the two files of GPT-2."""
    folder = tmp_path_factory.mktemp("gpt2")
    byte_pairs(pattern=None).model.save(str(folder))
    return folder


@pytest.fixture
def broken_folder(gpt2_folder: Path, tmp_path: Path) -> Path:
    """Returns a copy for tests that damage it."""
    return Path(shutil.copytree(gpt2_folder, tmp_path / "broken"))


def from_files(folder: Path | None) -> Tokenizer:
    return load_tokenizer(Gpt2Tokenizer(kind="gpt2", path=folder))


def documents(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """Returns the tokens of each text, as `encode_batch` delimits them."""
    encoded = tokenizer.encode_batch(texts)
    parts = np.split(encoded.tokens, np.cumsum(encoded.lengths))
    assert len(parts.pop()) == 0
    return [part.tolist() for part in parts]


def test_documents_are_encoded_as_transformers_encodes_them_and_end_in_end_of_text(gpt2_folder: Path) -> None:
    reference = GPT2Tokenizer.from_pretrained(gpt2_folder)
    tokenizer = from_files(gpt2_folder)
    found = documents(tokenizer, TEXTS)
    assert found == [[*reference.encode(text), reference.eos_token_id] for text in TEXTS]
    assert max(len(tokens) for tokens in found) > 10
    assert tokenizer.vocabulary_size == len(reference) == 400
    assert tokenizer.decode(found[2]) == TEXTS[2] + END_OF_TEXT


def test_openais_file_names_are_accepted(broken_folder: Path) -> None:
    (broken_folder / "vocab.json").rename(broken_folder / "encoder.json")
    (broken_folder / "merges.txt").rename(broken_folder / "vocab.bpe")
    assert from_files(broken_folder).vocabulary_size == 400


def test_a_vocabulary_without_padding_says_so_only_when_asked() -> None:
    tokenizer = train_tokenizer(TrainedTokenizer(kind="train", vocabulary_size=260), ["pack after pack"])
    with pytest.raises(DataError, match="has no pad_token"):
        _ = tokenizer.padding_id


def test_a_saved_tokenizer_is_read_as_utf_8_whatever_the_locale(gpt2_folder: Path, tmp_path: Path) -> None:
    tokenizer = from_files(gpt2_folder)
    tokenizer.save(tmp_path)
    script = (
        "import pathlib, sys\n"
        "from evenpack.data.tokenizers.tokenizer import Tokenizer\n"
        "print(Tokenizer.load(pathlib.Path(sys.argv[1])).checksum)\n"
    )
    ascii_alone = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    command = [sys.executable, "-c", script, str(tmp_path)]
    assert subprocess.check_output(command, text=True, env=ascii_alone) == f"{tokenizer.checksum}\n"


def longest_token(tokenizer: Tokenizer) -> int:
    return max(len(token.removeprefix("##")) for token in tokenizer.vocabulary if token[0] not in "<[")


@pytest.mark.parametrize(("kind", "length"), [("byte_pairs", 9), ("word_pieces", 31)])
def test_words_of_any_length_are_trained_on_in_pieces_and_encoded_whole(
    monkeypatch: pytest.MonkeyPatch, kind: str, length: int
) -> None:
    """The time of a word grows with the square of its length in training: a word of 30 MB would take days."""
    config = {
        "byte_pairs": TrainedTokenizer(kind="train", vocabulary_size=300),
        "word_pieces": TrainedWordPieces(kind="train_word_pieces", vocabulary_size=300),
    }[kind]
    texts = ["abcdefgh" * 8, "word"]
    assert longest_token(train_tokenizer(config, texts)) > 8
    monkeypatch.setattr(f"evenpack.data.tokenizers.{kind}.LONGEST_TRAINED_WORD", 8)
    pieces = train_tokenizer(config, texts)
    assert longest_token(pieces) == 8
    assert pieces.encode_batch([texts[0]]).lengths.tolist() == [length]


def test_training_on_too_little_text_says_so(caplog: pytest.LogCaptureFixture) -> None:
    config = TrainedTokenizer(kind="train", vocabulary_size=5000)
    assert train_tokenizer(config, ["apples and pears"] * 5).vocabulary_size < 300
    assert "fewer than 5000" in caplog.text
    with pytest.raises(DataError, match="no token beyond single bytes"):
        train_tokenizer(config, [])


def _without(folder: Path, name: str) -> None:
    (folder / name).unlink()


def _vocabulary(folder: Path, change: Any) -> None:
    path = folder / "vocab.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: _without(folder, "vocab.json"), "holds no vocab.json or encoder.json"),
        (lambda folder: _without(folder, "merges.txt"), "holds no merges.txt or vocab.bpe"),
        (lambda folder: (folder / "vocab.json").write_text("{}"), "vocab.json"),
        (lambda folder: (folder / "vocab.json").write_text("{broken"), "form no byte-level BPE"),
        (
            lambda folder: (folder / "merges.txt").write_text("#version: 0.2\n"),
            "its 0 merges never form 143 of the 400",
        ),
        (lambda folder: _vocabulary(folder, lambda v: {k: i for k, i in v.items() if k != END_OF_TEXT}), "lack 1"),
        (lambda folder: _vocabulary(folder, lambda v: {k: i + 1 for k, i in v.items()}), "are not 0 to 399"),
        (lambda folder: _vocabulary(folder, lambda v: {**v, "zebra": len(v)}), "'zebra' first"),
        (shutil.rmtree, "does not exist"),
    ],
)
def test_wrong_gpt2_files_are_refused_by_name(broken_folder: Path, spoil: Any, message: str) -> None:
    spoil(broken_folder)
    with pytest.raises(DataError, match=message) as caught:
        from_files(broken_folder)
    assert str(broken_folder) in str(caught.value)


def test_a_tokenizer_without_path_names_the_override() -> None:
    with pytest.raises(DataError, match=r"data\.tokenizer\.path=FOLDER"):
        from_files(None)


def _word_level(folder: Path, config: dict[str, str]) -> str:
    """Writes a folder with an unknown token for AutoTokenizer."""
    values = {"tokenizer_class": FAST, "unk_token": "[UNK]", **config}
    return str(Folder(backend=lambda: whole_words("[UNK]", "cat", "the", "</s>"), config=values).write(folder))


def bounds_of(folder: Path) -> tuple[str | None, str | None]:
    automatic = AutoTokenizer.from_pretrained(folder)
    return automatic.bos_token, automatic.eos_token


def test_a_saved_tokenizer_has_the_first_and_last_tokens_of_its_own_and_no_others(tmp_path: Path) -> None:
    pieces = train_tokenizer(TrainedWordPieces(kind="train_word_pieces", vocabulary_size=64), ["the cat sat"] * 9)
    pieces.save(tmp_path / "pieces")
    assert bounds_of(tmp_path / "pieces") == (None, None), "BERT has neither"
    again = Tokenizer.load(tmp_path / "pieces")
    assert (again.checksum, again.end_of_text_id) == (pieces.checksum, pieces.end_of_text_id)
    again.save(tmp_path / "again")
    assert bounds_of(tmp_path / "again") == (None, None)
    both = _word_level(tmp_path / "both", {"bos_token": "the", "eos_token": "</s>"})
    load_tokenizer(HubTokenizer(kind="hub", name=both)).save(tmp_path / "saved")
    assert bounds_of(tmp_path / "saved") == ("the", "</s>")
    assert Tokenizer.load(tmp_path / "saved").end_of_text_id == 3
    separated = _word_level(tmp_path / "separated", {"sep_token": "</s>", "eos_token": "cat"})
    loaded = load_tokenizer(BertTokenizer(kind="bert", name=separated))
    loaded.save(tmp_path / "ended")
    assert Tokenizer.load(tmp_path / "ended").end_of_text_id == loaded.end_of_text_id == 3


def test_a_folder_that_names_no_end_is_refused(tmp_path: Path) -> None:
    folder = _word_level(tmp_path / "endless", {})
    with pytest.raises(DataError, match="names no eos_token or sep_token"):
        Tokenizer.load(Path(folder))


def test_unknown_tokens_are_counted(tmp_path: Path) -> None:
    name = _word_level(tmp_path / "words", {"eos_token": "</s>"})
    tokenizer = load_tokenizer(HubTokenizer(kind="hub", name=name))
    partly = tokenizer.encode_batch(["the zebra", "cat"])
    assert partly.tokens.tolist() == [2, 0, 3, 1, 3]
    assert partly.unknown_tokens == 1
    assert tokenizer.encode_batch(["zebra lion", "tiger"]).unknown_tokens == 3
    assert tokenizer.encode_batch(["", "  "]).unknown_tokens == 0


def test_a_single_character_that_ends_documents_is_refused_in_a_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer(whole_words("[UNK]", "cat", "|"), end_of_text="|", unknown="[UNK]")
    with pytest.raises(DataError, match=r"special token '\|' of the text that begins 'cat \| the'"):
        tokenizer.encode_batch(["the cat", "cat | the"])


def test_a_text_that_the_model_cannot_express_is_named() -> None:
    tokenizer = Tokenizer(whole_words("cat", "</s>"), end_of_text="</s>", unknown=None)
    assert tokenizer.encode_batch(["cat cat"]).tokens.tolist() == [0, 0, 1]
    with pytest.raises(DataError, match="cannot encode the text that begins 'cat dog'"):
        tokenizer.encode_batch(["cat", "cat dog"])


def test_hub_tokenizers_that_cannot_serve_are_refused(tmp_path: Path) -> None:
    for name, message in (
        (_word_level(tmp_path / "endless", {}), "has no end-of-text token"),
        (str(tmp_path / "nowhere"), "is no folder, and was not found on the hub"),
    ):
        with pytest.raises(DataError, match=message):
            load_tokenizer(HubTokenizer(kind="hub", name=name))


def test_an_empty_vocabulary_is_refused() -> None:
    with pytest.raises(DataError, match="vocabulary is empty"):
        Tokenizer(tokenizers.Tokenizer(models.BPE()), end_of_text=END_OF_TEXT, unknown=None)


def test_sentences_without_a_token_are_left_out_and_documents_keep_their_ends(gpt2_folder: Path) -> None:
    tokenizer = from_files(gpt2_folder)
    one, other = (documents(tokenizer, [text])[0][:-1] for text in (TEXTS[0], TEXTS[3]))
    encoded = tokenizer.encode_sentences([["", TEXTS[0], "", TEXTS[3]], [""], [TEXTS[0]]])
    end = tokenizer.end_of_text_id
    assert encoded.tokens.tolist() == [*one, *other, end, end, *one, end]
    assert encoded.lengths.tolist() == [len(one) + len(other) + 1, 1, len(one) + 1]
    assert encoded.columns[SENTENCE_LENGTHS].tolist() == [len(one), len(other), len(one)]


def test_tokenizers_that_encode_otherwise_have_other_checksums(gpt2_folder: Path) -> None:
    trained = train_tokenizer(TrainedTokenizer(kind="train", vocabulary_size=300), TEXTS * 3)
    larger = train_tokenizer(TrainedTokenizer(kind="train", vocabulary_size=310), TEXTS * 3)
    checksums = {one.checksum for one in (from_files(gpt2_folder), trained, larger)}
    assert len(checksums) == 3, "though documents end in the same words in all of them"
