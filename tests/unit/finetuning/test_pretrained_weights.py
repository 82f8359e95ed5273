"""Weights with which fine-tuning refuses to start."""

from pathlib import Path

import pytest
from finetuning_tasks import SPECIAL, WORDS, finetune_values, write_encoder, write_sentences
from tokenizers import pre_tokenizers

from evenpack.config import validate
from evenpack.data.tokenizers.word_pieces import read_word_pieces
from evenpack.errors import CheckpointError, ConfigError, DataError
from evenpack.finetuning.config import FinetuneConfig
from evenpack.finetuning.data import read_task
from evenpack.finetuning.model import read_pretrained
from evenpack.models.gpt2.config import Gpt2Config
from evenpack.models.gpt2.model import Gpt2
from evenpack.models.huggingface import to_huggingface


def config(folder: Path, encoder: Path, *, vocabulary: list[str] | None = None) -> FinetuneConfig:
    values = finetune_values("sst2", folder, encoder, folder / "out")
    if vocabulary is not None:
        (folder / "own").mkdir()
        (folder / "own" / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
        values["data"]["tokenizer"] = {"kind": "bert", "path": str(folder / "own")}
    return validate(values, FinetuneConfig, origin="test")


def test_a_decoder_is_refused(tmp_path: Path) -> None:
    section = Gpt2Config(kind="gpt2", layers=1, hidden_size=16, heads=2)
    model = Gpt2(section, vocabulary_size=20, max_positions=64)
    to_huggingface(model, tmp_path / "gpt2", tokenizer_dir=None, special_token_id=0)
    with pytest.raises(ConfigError, match=r"is of family 'gpt2', whose tokens see only earlier tokens"):
        read_pretrained(config(tmp_path, tmp_path / "gpt2"))


def test_a_tokenizer_that_the_weights_were_not_trained_with_is_refused(tmp_path: Path) -> None:
    encoder = write_encoder(tmp_path / "bert")
    (tmp_path / "a").mkdir()
    with pytest.raises(CheckpointError, match=r"has a vocabulary of 24 entries, the tokenizer one of 23"):
        read_pretrained(config(tmp_path / "a", encoder, vocabulary=[*SPECIAL, *WORDS[:-1]]))
    (tmp_path / "b").mkdir()
    with pytest.raises(CheckpointError, match=r"another vocabulary, .*: id 5 is 'good' in one and 'bad' in the other"):
        read_pretrained(config(tmp_path / "b", encoder, vocabulary=[*SPECIAL, "bad", "good", *WORDS[2:]]))
    (tmp_path / "c").mkdir()
    assert read_pretrained(config(tmp_path / "c", encoder, vocabulary=[*SPECIAL, *WORDS])).tokenizer.padding_id == 0


def test_another_tokenizer_of_the_weights_vocabulary_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    encoder = write_encoder(tmp_path / "bert")
    checked = config(tmp_path, encoder, vocabulary=[*SPECIAL, *WORDS])
    read_pretrained(checked)
    assert caplog.messages == []
    own = read_word_pieces(tmp_path / "own", lower_case=None)
    own.pre_tokenizer = pre_tokenizers.Split("o", "isolated")
    own.save(str(tmp_path / "own" / "tokenizer.json"))
    read_pretrained(checked)
    (warning,) = caplog.messages
    assert f"another tokenizer of the same vocabulary, in {encoder}, than data.tokenizer: of the text " in warning


def test_weights_without_a_tokenizer_and_without_a_path_are_refused(tmp_path: Path) -> None:
    encoder = write_encoder(tmp_path / "bert")
    (encoder / "vocab.txt").unlink()
    with pytest.raises(DataError, match=r"tokenizer\.model or vocab\.txt; give data\.tokenizer\.path=FOLDER"):
        read_pretrained(config(tmp_path, encoder))
    with pytest.raises(CheckpointError, match=r"training\.initialize_from: expected a run's output_dir"):
        read_pretrained(config(tmp_path, tmp_path / "nowhere"))


def test_weights_that_do_not_say_of_what_model_they_are_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.ckpt-1.index").touch()
    with pytest.raises(CheckpointError, match=r"training\.initialize_from: .*ckpt-1 \(TensorFlow\) does not describe"):
        read_pretrained(config(tmp_path, tmp_path / "model.ckpt-1"))


def test_texts_that_the_vocabulary_does_not_contain_are_refused(tmp_path: Path) -> None:
    checked = config(tmp_path, write_encoder(tmp_path / "bert"))
    write_sentences(tmp_path, training=4, evaluation=4)
    (tmp_path / "dev.tsv").write_text("sentence\tlabel\nquidquid agis prudenter agas et respice finem\t1\n")
    pretrained = read_pretrained(checked)
    with pytest.raises(DataError, match=r"dev\.tsv: 78 % of the tokens are unknown to the vocabulary"):
        read_task(checked.data, pretrained.tokenizer)
