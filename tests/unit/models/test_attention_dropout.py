"""Dropout of attention probabilities has a rate of its own in every family."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import build_batch, random_sequences
from masked_batches import build_masked_batch, random_pairs
from torch import Tensor

from evenpack.batch import PackedBatch
from evenpack.models.build import Model, new_model
from evenpack.models.common.layers import SelfAttention
from evenpack.models.families import config_of, find_family, known_families
from evenpack.models.huggingface import to_huggingface

VOCABULARY, LONGEST = 64, 24
EXPORTED = {
    "gpt2": "attn_pdrop",
    "llama": "attention_dropout",
    "modernbert": "attention_dropout",
    "bert": "attention_probs_dropout_prob",
}
"""Transformers' names of the rate, for each family that is exported."""


def model_of(kind: str, **settings: Any) -> Model:
    values = {"kind": kind, "layers": 2, "hidden_size": 32, "heads": 2, **settings}
    if kind == "llama":
        values |= {"key_value_heads": 1, "feed_forward_size": 48}
    config = config_of(kind).model_validate(values)
    return new_model(config, vocabulary_size=VOCABULARY, max_positions=LONGEST)


def batch_of(kind: str) -> PackedBatch:
    if find_family(kind).objective == "masked_tokens":
        pairs = [random_pairs([10, 14], vocabulary_size=VOCABULARY)]
        return build_masked_batch(pairs, "packed", max_sequence_length=LONGEST, pack_length=LONGEST)[0]
    sequences = [random_sequences([10, 14], vocabulary_size=VOCABULARY)]
    return build_batch(sequences, "packed", max_sequence_length=LONGEST, pack_length=LONGEST)[0]


def loss_and_gradient(model: Model, batch: PackedBatch, *, seed: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    model.zero_grad()
    loss = next(iter(model(batch).values())).loss_sum
    loss.backward()
    gradient = next(module for module in model.modules() if isinstance(module, SelfAttention)).output.weight.grad
    assert gradient is not None
    return loss.detach(), gradient.clone()


@pytest.mark.parametrize("kind", known_families())
def test_the_rate_is_that_of_dropout_unless_it_has_its_own(kind: str) -> None:
    for settings, rate in (
        ({"dropout": 0.2}, 0.2),
        ({"dropout": 0.2, "attention_dropout": 0.0}, 0.0),
        ({"dropout": 0.0, "attention_dropout": 0.3}, 0.3),
    ):
        model = model_of(kind, **settings)
        layers = [module for module in model.modules() if isinstance(module, SelfAttention)]
        assert [layer.dropout for layer in layers] == [rate, rate]
        dropouts = [module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)]
        assert set(dropouts) == {settings["dropout"]}, "the others keep theirs"


@pytest.mark.parametrize("kind", known_families())
def test_dropout_of_attention_alone_is_recomputed_with_the_same_draws(kind: str) -> None:
    batch = batch_of(kind)
    plain, checkpointed = (
        model_of(kind, dropout=0.0, attention_dropout=0.4, activation_checkpointing=checkpointing)
        for checkpointing in (False, True)
    )
    loss, gradient = loss_and_gradient(plain, batch, seed=3)
    again, same_gradient = loss_and_gradient(checkpointed, batch, seed=3)
    assert torch.equal(loss, again)
    torch.testing.assert_close(gradient, same_gradient)
    assert not torch.equal(loss, loss_and_gradient(plain, batch, seed=4)[0]), "something is dropped"


@pytest.mark.parametrize("kind", [kind for kind in known_families() if find_family(kind).huggingface is not None])
def test_transformers_is_told_both_rates(kind: str, tmp_path: Path) -> None:
    model = model_of(kind, dropout=0.2, attention_dropout=0.0)
    to_huggingface(model, tmp_path, tokenizer_dir=None, special_token_id=0)
    values = json.loads((tmp_path / "config.json").read_text())
    assert values[EXPORTED[kind]] == 0.0
    others = {value for key, value in values.items() if key in ("embd_pdrop", "resid_pdrop", "hidden_dropout_prob")}
    assert others <= {0.2}
