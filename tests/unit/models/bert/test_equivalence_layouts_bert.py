"""The layout of pairs changes neither the losses of BERT nor the gradients (invariant 3)."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from batches import LAYOUTS
from exchanged_weights import huggingface_weights
from masked_batches import build_masked_batch, random_pairs, roughen
from transformers import BertConfig as TheirConfig
from transformers import BertForPreTraining

from evenpack.models.bert.config import BertConfig
from evenpack.models.bert.model import Bert
from evenpack.models.common.loss_sums import exact_denominators, scaled_loss

VOCABULARY = 67
LONGEST = 40
LENGTHS = [[40], [25, 9, 2, 3], [13, 13, 11], [3, 30]]
CPU_BACKENDS = ("auto", "reference", "sdpa")
REDUCTIONS = ("token", "sequence")
RELATIVE_TOLERANCE = 1e-5


def build_model(backend="auto", mlm_reduction="token"):
    config = BertConfig(
        kind="bert", preset="tiny", layers=3, hidden_size=64, heads=4, dropout=0.0, mlm_reduction=mlm_reduction
    )
    model = Bert(config, vocabulary_size=VOCABULARY, max_positions=LONGEST, attention_backend=backend, seed=2)
    roughen(model)
    return model


def packs():
    return [random_pairs(lengths, vocabulary_size=VOCABULARY, seed=sum(lengths)) for lengths in LENGTHS]


def batch_of(layout, mlm_reduction="token"):
    batch, _ = build_masked_batch(
        packs(), layout, max_sequence_length=LONGEST, pack_length=LONGEST, mlm_reduction=mlm_reduction
    )
    return batch


def losses_and_gradients(model, batch):
    """Returns both mean losses, and the gradients of their sum."""
    model.zero_grad()
    denominators = exact_denominators(model.config.losses, batch.step_counts)
    sums = model(batch)
    scaled_loss(sums, denominators, world_size=1, accumulation=1).backward()
    means = [
        sums["masked_token"].loss_sum.item() / denominators["masked_token"],
        sums["next_sentence"].loss_sum.item() / denominators["next_sentence"],
    ]
    return means, {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_same_gradients(found, expected):
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.norm() > 0, name
        assert (found[name] - gradient).norm() <= RELATIVE_TOLERANCE * gradient.norm(), name


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("mlm_reduction", REDUCTIONS)
def test_packed_unpadded_and_padded_give_the_same_losses_and_gradients(mlm_reduction, backend):
    batches = {layout: batch_of(layout, mlm_reduction) for layout in LAYOUTS}
    assert {layout: batch.slots for layout, batch in batches.items()} == {
        "packed": 4 * LONGEST,
        "unpadded": sum(map(sum, LENGTHS)),
        "padded": sum(map(len, LENGTHS)) * LONGEST,
    }
    expected_losses, expected = losses_and_gradients(build_model("reference", mlm_reduction), batches["unpadded"])
    for batch in batches.values():
        losses, gradients = losses_and_gradients(build_model(backend, mlm_reduction), batch)
        assert losses == pytest.approx(expected_losses, rel=RELATIVE_TOLERANCE)
        assert_same_gradients(gradients, expected)


def transformers_losses(model):
    """Returns both losses and the gradients of transformers' BERT with the same weights, sequence by sequence."""
    shape = model.config.shape
    theirs = BertForPreTraining(
        TheirConfig(
            vocab_size=VOCABULARY,
            max_position_embeddings=LONGEST,
            hidden_size=shape["hidden_size"],
            num_hidden_layers=shape["layers"],
            num_attention_heads=shape["heads"],
            intermediate_size=4 * shape["hidden_size"],
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            pad_token_id=None,
        )
    )
    theirs.load_state_dict(huggingface_weights(model), strict=False)
    theirs.tie_weights()
    masked, pair_losses = [], []
    for pair in (pair for pack in packs() for pair in pack):
        outputs = theirs(torch.tensor([pair.tokens]), token_type_ids=torch.tensor([pair.token_types]))
        logits = outputs.prediction_logits[0, list(pair.masked)]
        masked.append(F.cross_entropy(logits, torch.tensor(list(pair.masked.values())), reduction="none"))
        label = torch.tensor([pair.next_sentence_label])
        pair_losses.append(F.cross_entropy(outputs.seq_relationship_logits, label))
    if model.config.mlm_reduction == "token":
        mlm_loss = torch.cat(masked).mean()
    else:
        mlm_loss = torch.stack([losses.mean() for losses in masked]).mean()
    next_sentence_loss = torch.stack(pair_losses).mean()
    (mlm_loss + next_sentence_loss).backward()
    return [mlm_loss.item(), next_sentence_loss.item()], theirs


@pytest.mark.parametrize("mlm_reduction", REDUCTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_what_transformers_gives_on_single_sequences(layout, mlm_reduction):
    model = build_model(mlm_reduction=mlm_reduction)
    losses, gradients = losses_and_gradients(model, batch_of(layout, mlm_reduction))
    expected_losses, theirs = transformers_losses(model)
    assert losses == pytest.approx(expected_losses, rel=RELATIVE_TOLERANCE)
    expected = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    with torch.no_grad():  # gradients take the way of the weights, so that the names and parts are those of export
        for name, parameter in model.named_parameters():
            parameter.copy_(gradients[name])
    found = huggingface_weights(model)
    for name in [name for name in found if name.endswith("key.bias")]:
        # Adds the same to all scores of a query: its gradient is zero but for rounding.
        scale = expected[name.replace("key", "query")].norm()
        assert max(found.pop(name).norm(), expected.pop(name).norm()) <= RELATIVE_TOLERANCE * scale
    assert_same_gradients(found, expected)


def test_reductions_differ_where_sequences_have_unequal_masked_tokens():
    losses = [losses_and_gradients(build_model(mlm_reduction=kind), batch_of("packed", kind))[0] for kind in REDUCTIONS]
    assert abs(losses[0][0] - losses[1][0]) > 1e-2
    assert losses[0][1] == losses[1][1]


def test_a_model_that_mixes_segments_would_miss_the_tolerance_by_far():
    """This is the control: isolation is off, everything else is the same."""
    model, batch = build_model(), batch_of("packed")
    rows = torch.arange(0, batch.slots + 1, LONGEST, dtype=torch.int32)
    expected, _ = losses_and_gradients(model, batch)
    found, _ = losses_and_gradients(model, replace(batch, cu_seqlens=rows))
    for one, other in zip(found, expected, strict=True):
        assert abs(one - other) > 100 * RELATIVE_TOLERANCE * other
