"""A run starts with a checkpoint of TensorFlow or of NVIDIA's PyTorch code, or refuses it."""

import argparse
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from masked_batches import build_masked_batch, random_pairs
from scored_tokens import masked_token_logits, next_sentence_logits
from tensorflow_checkpoints import BERT, POSITIONS, SHAPE, SHARDS, VOCABULARY, copy_of, transformers_weights
from torch import Tensor
from transformers import BertConfig, BertForPreTraining

from evenpack.engine.checkpoints.initial_weights import initialize
from evenpack.engine.sharding import SHARDINGS
from evenpack.engine.world.distributed import World
from evenpack.errors import CheckpointError
from evenpack.models.build import Model, new_model
from evenpack.models.families import config_of
from evenpack.models.foreign import tensor_bundle
from evenpack.models.foreign.tensor_bundle import read_table

SOLO = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
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


def nvidia_weights(rows: int = VOCABULARY) -> dict[str, Tensor]:
    """Returns weights in the form of DeepLearningExamples: layers with activations, tied decoder, padded vocabulary."""
    weights = {
        re.sub(r"(intermediate|pooler|transform)\.dense\.", r"\1.dense_act.", name): tensor
        for name, tensor in transformers_weights().items()
    }
    for name in ("bert.embeddings.word_embeddings.weight", "cls.predictions.bias"):
        filling = torch.full((rows - VOCABULARY, *weights[name].shape[1:]), -7.0)
        weights[name] = torch.cat([weights[name], filling])
    return weights | {"cls.predictions.decoder.weight": weights["bert.embeddings.word_embeddings.weight"]}


def save(content: Any, path: Path) -> Path:
    torch.save(content, path)
    return path


def wrapped(weights: dict[str, Tensor]) -> dict[str, Any]:
    return {"model": weights, "optimizer": {"state": {0: {"exp_avg": torch.zeros(3)}}}, "epoch": 2}


def of_data_parallel(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"module.{name}": tensor for name, tensor in weights.items()}


@pytest.mark.parametrize(
    ("content", "account"),
    [
        (wrapped, "46 tensors used, 3 ignored: cls.predictions.decoder.weight, optimizer, epoch"),
        (of_data_parallel, "46 tensors used, 1 ignored: cls.predictions.decoder.weight"),
        (lambda weights: transformers_weights(), "46 tensors used"),
    ],
    ids=["wrapped", "module", "plain"],
)
def test_a_state_dict_of_pytorch_fills_the_model(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, content: Any, account: str
) -> None:
    caplog.set_level(logging.INFO)
    path = save(content(nvidia_weights()), tmp_path / "ckpt_7038.pt")
    model = make_model()
    begin(model, path, tmp_path)
    assert_outputs_are_transformers(model)
    assert told_of(caplog) == f"initialised from {path} (PyTorch); {account}; {NO_HEADS}"


def test_a_file_in_the_format_before_torch_1_6_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "old.pt"
    torch.save(wrapped(nvidia_weights()), path, _use_new_zipfile_serialization=False)
    model = make_model()
    begin(model, path, tmp_path)
    assert_outputs_are_transformers(model)


def test_rows_that_pad_the_vocabulary_to_a_multiple_of_8_are_named_and_ignored(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.INFO)
    path = save(wrapped(nvidia_weights(rows=208)), tmp_path / "ckpt.pt")
    model = make_model()
    begin(model, path, tmp_path)
    assert_outputs_are_transformers(model)
    assert (
        "rows 203 to 207 of bert.embeddings.word_embeddings.weight and cls.predictions.bias taken for padding up to a "
        "multiple of 8 and ignored"
    ) in told_of(caplog)


def test_entries_in_place_of_padding_are_recognised_by_the_vocabulary_file(tmp_path: Path) -> None:
    path = save(nvidia_weights(rows=208), tmp_path / "ckpt.pt")
    words = [f"word{number}" for number in range(208)]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "vocab.txt").write_text("\n".join(words[:VOCABULARY]))
    assert "id 203 is 'word203' in one and None in the other" in refusal(make_model(), path, tmp_path)


@pytest.mark.parametrize("rows", [204, 207, 216])
def test_other_rows_beyond_the_vocabulary_are_another_vocabulary(tmp_path: Path, rows: int) -> None:
    message = refusal(make_model(), save(nvidia_weights(rows=rows), tmp_path / "ckpt.pt"), tmp_path)
    assert f"bert.embeddings.word_embeddings.weight: expected shape (203, 8), found ({rows}, 8)" in message


def test_tensorflow_does_not_fill_up_so_more_rows_are_another_vocabulary(tmp_path: Path) -> None:
    message = refusal(make_model(vocabulary_size=197), BERT, tmp_path)
    assert "bert/embeddings/word_embeddings: expected shape (197, 8), found (203, 8)" in message
    assert "cls/predictions/output_bias: expected shape (197,), found (203,)" in message


def test_too_few_positions_are_refused(tmp_path: Path) -> None:
    message = refusal(make_model(rows=32), BERT, tmp_path)
    assert "bert/embeddings/position_embeddings: expected shape (32, 8), found (24, 8)" in message


def test_missing_and_surplus_layers_and_heads_are_named_as_they_are_called_there(tmp_path: Path) -> None:
    message = refusal(make_model(layers=3), BERT, tmp_path)
    assert "bert/encoder/layer_2/attention/self/query/kernel: expected shape (8, 8), missing" in message
    assert message.count(", missing") == 16
    message = refusal(make_model(layers=1), BERT, tmp_path)
    assert "bert/encoder/layer_1/intermediate/dense/kernel: unknown here, found shape (8, 32)" in message
    assert "adam_m" not in message
    message = refusal(make_model(next_sentence=False), BERT, tmp_path)
    assert message.count("unknown here") == 4
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


def test_a_checkpoint_of_no_known_kind_says_how_one_would_be_known(tmp_path: Path) -> None:
    message = refusal(make_model(), SHARDS, tmp_path)
    assert "has no bert/embeddings/word_embeddings, by which its kind of model would be known" in message
    assert "it has beta1_power, beta2_power, brain and such" in message
    message = refusal(make_model(), save({"weight": torch.zeros(2)}, tmp_path / "other.pt"), tmp_path)
    assert "has no bert.embeddings.word_embeddings.weight, by which" in message


def test_another_kind_of_model_is_refused(tmp_path: Path) -> None:
    for path in (BERT, save(nvidia_weights(), tmp_path / "ckpt.pt")):
        message = refusal(make_model(kind="gpt2"), path, tmp_path)
        assert f"{path} is of a model with kind bert, this run has model.kind gpt2: make them alike" in message


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


def test_damaged_files_are_named(tmp_path: Path) -> None:
    prefix = copy_of(BERT, tmp_path / "theirs")
    data = Path(f"{prefix}.data-00000-of-00001")
    data.write_bytes(data.read_bytes()[:20_000])
    assert f"{data} is cut off: expected at least" in refusal(make_model(), prefix, tmp_path)
    path = save(nvidia_weights(), tmp_path / "ckpt.pt")
    content = bytearray(path.read_bytes())
    place = content.index(transformers_weights()["bert.pooler.dense.weight"].numpy().tobytes())
    content[place + 3] ^= 1
    path.write_bytes(content)
    assert f"{path} is damaged: the checksum of ckpt/data/" in refusal(make_model(), path, tmp_path)
    path.write_bytes(content[: len(content) // 2])
    assert f"{path} cannot be read as tensors and plain values" in refusal(make_model(), path, tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"model": nvidia_weights(), "args": argparse.Namespace(a=1)}, "no code in a file is run"),
        ([1, 2], "must hold a dict, found list"),
        ({"state_dict": {"weight": torch.zeros(2)}}, "found state_dict (dict): save the model's state_dict() so"),
        ({}, "found nothing"),
    ],
    ids=["class", "list", "wrapper", "empty"],
)
def test_a_file_that_is_no_state_dict_says_what_was_found(tmp_path: Path, content: Any, message: str) -> None:
    assert message in refusal(make_model(), save(content, tmp_path / "ckpt.pt"), tmp_path)


def test_tensors_that_are_there_twice_must_be_one(tmp_path: Path) -> None:
    weights = nvidia_weights() | {"bert.pooler.dense.bias": torch.zeros(8)}
    message = refusal(make_model(), save(weights, tmp_path / "ckpt.pt"), tmp_path)
    assert "bert.pooler.dense.bias occurs twice, with `dense` and with `dense_act` in its name" in message
    weights = nvidia_weights() | {"cls.predictions.decoder.weight": torch.zeros(VOCABULARY, 8)}
    message = refusal(make_model(), save(weights, tmp_path / "ckpt.pt"), tmp_path)
    assert "decoder.weight differs from bert.embeddings.word_embeddings.weight" in message
