"""A run starts with a checkpoint of TensorFlow, or refuses it."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from masked_batches import build_masked_batch, random_pairs
from scored_tokens import masked_token_logits, next_sentence_logits
from tensorflow_checkpoints import BERT, POSITIONS, SHAPE, SHARDS, VOCABULARY, copy_of, transformers_weights
from test_checkpoint_files import SOLO
from transformers import BertConfig, BertForPreTraining

from evenpack.engine.checkpoints.initial_weights import initialize
from evenpack.engine.sharding import SHARDINGS
from evenpack.errors import CheckpointError
from evenpack.models.build import Model, new_model
from evenpack.models.families import config_of
from evenpack.models.foreign import tensor_bundle
from evenpack.models.foreign.tensor_bundle import read_table

TOLERANCE = 1e-5
NO_HEADS = "neither a tensor nor a bert_config.json gives the number of heads: 2, as here"
THEIR_CONFIG = {
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": POSITIONS,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
}


def make_model(*, vocabulary_size: int = VOCABULARY, rows: int = POSITIONS, **section: Any) -> Model:
    values = SHAPE | section
    config = config_of(values["kind"]).model_validate(values)
    return new_model(config, vocabulary_size=vocabulary_size, max_positions=rows, seed=1)


def begin(model: Model, path: Path, folder: Path) -> None:
    initialize(model, path, tokenizer_dir=folder / "here", world=SOLO, sharding=SHARDINGS[0])


def told_of(caplog: pytest.LogCaptureFixture) -> str:
    """Returns the one log line about the weights."""
    (message,) = [message for message in caplog.messages if message.startswith("initialised from")]
    return message


def refusal(model: Model, path: Path, folder: Path) -> str:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        begin(model, path, folder)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert str(caught.value).startswith("training.initialize_from: ")
    return str(caught.value)


@torch.no_grad()
def assert_outputs_are_transformers(model: Model) -> None:
    """Compares the outputs with a model of transformers that was given the same numbers by hand."""
    theirs = BertForPreTraining(BertConfig(**THEIR_CONFIG)).eval()
    missing, surplus = theirs.load_state_dict(transformers_weights(), strict=False)
    assert (sorted(missing), surplus) == (["cls.predictions.decoder.bias", "cls.predictions.decoder.weight"], [])
    theirs.tie_weights()
    (pair,) = random_pairs([POSITIONS], vocabulary_size=VOCABULARY)
    batch, _ = build_masked_batch([[pair]], "packed", max_sequence_length=POSITIONS)
    expected = theirs(torch.tensor([pair.tokens]), token_type_ids=torch.tensor([pair.token_types]))
    logits = expected.prediction_logits[0, list(pair.masked)]
    assert logits.abs().max() > 1
    model = model.eval()
    torch.testing.assert_close(masked_token_logits(model, batch)[: len(logits)], logits, rtol=0.0, atol=TOLERANCE)
    next_sentence = next_sentence_logits(model, batch)[0]
    torch.testing.assert_close(next_sentence, expected.seq_relationship_logits[0], rtol=0.0, atol=TOLERANCE)


@pytest.mark.parametrize("ending", ["", ".index"])
def test_a_tensorflow_checkpoint_fills_the_model_and_accounts_for_each_tensor(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, ending: str
) -> None:
    caplog.set_level(logging.INFO)
    model = make_model()
    begin(model, Path(f"{BERT}{ending}"), tmp_path)
    assert_outputs_are_transformers(model)
    account = "46 tensors used, 93 ignored: optimizer state (adam_m, adam_v), global_step"
    assert told_of(caplog) == f"initialised from {BERT} (TensorFlow); {account}; {NO_HEADS}"


def test_other_sizes_and_another_kind_of_model_are_refused(tmp_path: Path) -> None:
    message = refusal(make_model(vocabulary_size=197), BERT, tmp_path)
    assert "bert/embeddings/word_embeddings: expected shape (197, 8), found (203, 8)" in message
    assert "cls/predictions/output_bias: expected shape (197,), found (203,)" in message
    message = refusal(make_model(rows=32), BERT, tmp_path)
    assert "bert/embeddings/position_embeddings: expected shape (32, 8), found (24, 8)" in message
    assert "with kind bert, this run has model.kind gpt2" in refusal(make_model(kind="gpt2"), BERT, tmp_path)


def test_missing_and_surplus_layers_and_heads_are_named_as_they_are_called_there(tmp_path: Path) -> None:
    message = refusal(make_model(layers=3), BERT, tmp_path)
    assert "bert/encoder/layer_2/attention/self/query/kernel: expected shape (8, 8), missing" in message
    assert message.count(", missing") == 16
    message = refusal(make_model(layers=1), BERT, tmp_path)
    assert "bert/encoder/layer_1/intermediate/dense/kernel: unknown here, found shape (8, 32)" in message
    assert "adam_m" not in message
    message = refusal(make_model(next_sentence=False), BERT, tmp_path)
    assert "cls/seq_relationship/output_weights: unknown here, found shape (2, 8)" in message


def test_one_missing_and_one_surplus_variable_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_another_name(path: Path) -> dict[bytes, bytes]:
        table = read_table(path)
        table[b"bert/pooler/dense/odd"] = table.pop(b"bert/pooler/dense/bias")
        return table

    monkeypatch.setattr(tensor_bundle, "read_table", with_another_name)
    message = refusal(make_model(), BERT, tmp_path)
    assert "bert/pooler/dense/bias: expected shape (8,), missing" in message
    assert "bert/pooler/dense/odd: unknown here, found shape (8,)" in message
    assert "bert/pooler/dense/bias/adam_m: unknown here, found shape (8,)" in message
    assert len(message.splitlines()) == 6


def test_what_is_of_no_known_kind_says_how_one_would_be_known(tmp_path: Path) -> None:
    assert "has no bert/embeddings/word_embeddings" in refusal(make_model(), SHARDS, tmp_path)
    path = tmp_path / "ckpt_7038.pt"
    torch.save(transformers_weights(), path)
    assert f"{path} is a state dict of PyTorch: load it with transformers" in refusal(make_model(), path, tmp_path)


def test_a_configuration_beside_it_gives_the_heads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    prefix = copy_of(BERT, tmp_path / "theirs")
    config = prefix.parent / "bert_config.json"
    config.write_text(json.dumps(THEIR_CONFIG))
    begin(make_model(), prefix, tmp_path)
    assert told_of(caplog).endswith("global_step")
    assert "with heads 2, this run has model.heads 4" in refusal(make_model(heads=4), prefix, tmp_path)
    config.write_text(json.dumps(THEIR_CONFIG | {"hidden_act": "relu"}))
    assert "hidden_act must be 'gelu', found 'relu'" in refusal(make_model(), prefix, tmp_path)
    config.write_text("[")
    assert f"{config}: not a readable JSON file" in refusal(make_model(), prefix, tmp_path)


def test_the_vocabulary_beside_the_checkpoint_is_compared(tmp_path: Path) -> None:
    prefix = copy_of(BERT, tmp_path / "theirs")
    (tmp_path / "here").mkdir()
    words = [f"word{number}" for number in range(VOCABULARY)]
    (prefix.parent / "vocab.txt").write_text("\n".join(words))
    (tmp_path / "here" / "vocab.txt").write_text("\n".join(words))
    begin(make_model(), prefix, tmp_path)
    (tmp_path / "here" / "vocab.txt").write_text("\n".join([*words[:-2], words[-1], words[-2]]))
    assert "id 201 is 'word201' in one and 'word202' in the other" in refusal(make_model(), prefix, tmp_path)
