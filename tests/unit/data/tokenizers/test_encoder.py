"""Tokenizers encode texts and pairs, special tokens included."""

from pathlib import Path
from typing import Any

import pytest
from transformers import BertTokenizerFast
from wordpiece import SPECIAL, WORDS, write_vocabulary

from evenpack.data.tokenizers import loading
from evenpack.data.tokenizers.loading import load_token_counter
from evenpack.errors import DataError

TEXTS = ["the cats sat.", "", "The CAT", "the dog [SEP] on it"]


def reference() -> BertTokenizerFast:
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *WORDS])}
    return BertTokenizerFast(vocab=vocabulary, do_lower_case=True)


def test_a_vocabulary_of_bert_encodes_as_transformers_does(tmp_path: Path) -> None:
    found = load_token_counter(write_vocabulary(tmp_path / "bert"))
    tokenizer = reference()
    plain = [text for text in TEXTS if "[" not in text]
    assert found.lengths(plain).tolist() == [len(tokenizer(text)["input_ids"]) for text in plain] == [7, 2, 4]
    pairs = [(first, second) for first in plain for second in plain]
    together = tokenizer([first for first, _ in pairs], [second for _, second in pairs])["input_ids"]
    assert found.lengths(pairs).tolist() == [len(ids) for ids in together]
    assert found.lengths([("the cat", "it sat")]).tolist() == [7]


def test_entries_of_a_vocabulary_are_divided_by_line_ends_alone(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("[PAD]\na\u2028b\n\x85\nc\n", encoding="utf-8")
    words = loading.read_vocabulary(tmp_path)
    assert words is not None
    assert (words["a\u2028b"], words["c"]) == (1, 3)


def test_a_capital_letter_in_the_vocabulary_makes_it_cased(tmp_path: Path) -> None:
    folder = tmp_path / "cased"
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join([*SPECIAL, "T", "t", "##he", "##t"]))
    found = load_token_counter(str(folder))
    assert found.lengths(["tt", "The", "TT"]).tolist() == [4, 4, 3]  # TT is unknown


def test_texts_are_encoded_in_batches_without_losing_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = load_token_counter(write_vocabulary(tmp_path / "bert"))
    texts = ["the cat " * (number * 7 % 5) for number in range(40)] + ["the " * 100]
    whole = found.lengths(texts).tolist()
    assert whole == [2 + 2 * (number * 7 % 5) for number in range(40)] + [102]
    encoder = found._encoder
    batches: list[int] = []

    class Recording:
        def encode_batch_fast(self, texts: list[str]) -> list[Any]:
            batches.append(len(texts))
            return list(encoder.encode_batch_fast(texts))

    monkeypatch.setattr(loading, "_BATCH_CHARACTERS", 50)
    monkeypatch.setattr(found, "_encoder", Recording())
    assert found.lengths(texts).tolist() == whole
    assert len(batches) > 5
    assert sum(batches) == len(texts)
    assert found.lengths([]).tolist() == []


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "holds no vocab.json"),
        ({"vocab.txt": "the\ncat\n"}, r"is not a BERT vocabulary: its 2 entries lack"),
        ({"vocab.txt": "\udcff"}, "is not a readable WordPiece vocabulary"),
        ({"tokenizer.json": "{}"}, "holds no readable tokenizer"),
        ({"config.json": "{}"}, "AutoTokenizer.from_pretrained"),
    ],
)
def test_a_folder_that_is_no_tokenizer_is_named(tmp_path: Path, files: dict[str, str], message: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content, errors="surrogateescape")
    with pytest.raises(DataError, match=message):
        load_token_counter(str(tmp_path))
