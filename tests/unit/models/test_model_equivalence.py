"""The layout of sequences changes neither the losses of a whole model nor the gradients (invariant 3)."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from batches import LAYOUTS, build_batch, random_sequences
from exchanged_weights import huggingface_weights
from masked_batches import build_masked_batch, random_pairs, roughen
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForPreTraining

from evenpack.models.build import new_model
from evenpack.models.common.loss_sums import exact_denominators, scaled_loss
from evenpack.models.families import config_of, find_family
from evenpack.models.huggingface import mapping_of

VOCABULARY = 67
LONGEST = 40
LENGTHS = [[40], [25, 9, 2, 1], [13, 13, 11], [3, 30]]
RELATIVE_TOLERANCE = 1e-5

SHAPE = {"preset": "tiny", "layers": 3, "hidden_size": 64, "heads": 4, "dropout": 0.0}
SCALING = {"factor": 8.0, "low_frequency_factor": 1.0, "high_frequency_factor": 4.0, "original_positions": 32}
LLAMA = {"kind": "llama", "key_value_heads": 2, "feed_forward_size": 96}
MODELS: dict[str, dict[str, Any]] = {
    "learned": {"kind": "gpt2", "positions": "learned"},
    "alibi": {"kind": "gpt2", "positions": "alibi"},
    "rotary": {"kind": "gpt2", "positions": "rotary"},
    "llama": LLAMA,
    "llama, tied": LLAMA | {"key_value_heads": 1, "tied_head": True},
    "llama, scaled rotations": LLAMA | {"rotary_base": 500.0, "rotary_scaling": SCALING},
    "bert": {"kind": "bert"},
    "bert, each sequence the same": {"kind": "bert", "mlm_reduction": "sequence"},
    "modernbert": {"kind": "modernbert", "feed_forward_size": 64, "window": 5, "layers": 5},
}
KNOWN_TO_TRANSFORMERS = [name for name in MODELS if name not in ("alibi", "rotary", "modernbert")]
"""ModernBERT is compared in a file of its own."""


def is_encoder(model):
    return find_family(model.config.kind).objective == "masked_tokens"


def build_model(name, backend="auto"):
    config = config_of(MODELS[name]["kind"]).model_validate(SHAPE | MODELS[name])
    model = new_model(config, vocabulary_size=VOCABULARY, max_positions=LONGEST, attention_backend=backend, seed=2)
    if is_encoder(model):  # initial weights hardly attend: larger ones make every path count
        roughen(model)
        return model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    return model


def packs_of(model):
    if not is_encoder(model):
        return [random_sequences(lengths, vocabulary_size=VOCABULARY, seed=sum(lengths)) for lengths in LENGTHS]
    at_least_two = [[max(length, 2) for length in lengths] for lengths in LENGTHS]
    return [random_pairs(lengths, vocabulary_size=VOCABULARY, seed=sum(lengths)) for lengths in at_least_two]


def batch_of(model, layout, *, isolate=True, reset_positions=True):
    """Returns the packs in a layout, by the switches for study."""
    settings = {"max_sequence_length": LONGEST, "pack_length": LONGEST}
    if is_encoder(model):
        reduction = getattr(model.config, "mlm_reduction", "token")
        batch, _ = build_masked_batch(packs_of(model), layout, mlm_reduction=reduction, **settings)
    else:
        batch, _ = build_batch(packs_of(model), layout, **settings)
    if not isolate:  # a pack is one segment
        batch = replace(batch, cu_seqlens=torch.arange(0, batch.slots + 1, LONGEST, dtype=torch.int32))
    if not reset_positions:
        batch = replace(batch, position_ids=torch.arange(batch.slots) % LONGEST)
    return batch


def losses_and_gradients(model, batch):
    """Returns the mean losses, and the gradients of their sum."""
    model.zero_grad()
    denominators = exact_denominators(model.config.losses, batch.step_counts)
    outputs = model(batch)
    scaled_loss(outputs, denominators, world_size=1, accumulation=1).backward()
    losses = [outputs[name].loss_sum.item() / denominator for name, denominator in denominators.items()]
    return losses, {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_same_gradients(found, expected):
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.norm() > 0, name
        assert (found[name] - gradient).norm() <= RELATIVE_TOLERANCE * gradient.norm(), name


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("name", MODELS)
def test_packed_unpadded_and_padded_give_the_same_losses_and_gradients(name, backend):
    model, oracle = build_model(name, backend), build_model(name, "reference")
    batches = {layout: batch_of(model, layout) for layout in LAYOUTS}
    assert batches["packed"].slots == 4 * LONGEST
    assert batches["unpadded"].slots == batches["unpadded"].step_counts.tokens
    assert batches["padded"].slots == sum(map(len, LENGTHS)) * LONGEST
    expected_losses, expected = losses_and_gradients(oracle, batches["unpadded"])
    for batch in batches.values():
        losses, gradients = losses_and_gradients(model, batch)
        assert losses == pytest.approx(expected_losses, rel=RELATIVE_TOLERANCE)
        assert_same_gradients(gradients, expected)


def transformers_losses(model):
    """Returns the losses of transformers with the same weights, one un-packed sequence after another, and its model."""
    values = mapping_of(model.config).config_values(model, 0) | {"pad_token_id": None}
    kind = AutoModelForPreTraining if is_encoder(model) else AutoModelForCausalLM
    theirs = kind.from_config(AutoConfig.for_model(**values), attn_implementation="eager")
    theirs.load_state_dict(huggingface_weights(model), strict=False)
    theirs.tie_weights()
    by_sequence, of_pairs = [], []
    for sequence in (sequence for pack in packs_of(model) for sequence in pack):
        if is_encoder(model):
            outputs = theirs(torch.tensor([sequence.tokens]), token_type_ids=torch.tensor([sequence.token_types]))
            scores, labels = outputs.prediction_logits[0, list(sequence.masked)], [*sequence.masked.values()]
            label = torch.tensor([sequence.next_sentence_label])
            of_pairs.append(F.cross_entropy(outputs.seq_relationship_logits, label))
        else:
            scores, labels = theirs(torch.tensor([sequence]), use_cache=False).logits[0, :-1], sequence[1:]
        labels = torch.tensor(labels, dtype=torch.int64)
        by_sequence.append(F.cross_entropy(scores, labels, reduction="none"))
    if getattr(model.config, "mlm_reduction", "token") == "sequence":
        by_sequence = [losses.mean(dim=0, keepdim=True) for losses in by_sequence]
    losses = [torch.cat(by_sequence).mean(), *([torch.stack(of_pairs).mean()] if of_pairs else [])]
    torch.stack(losses).sum().backward()
    return [loss.item() for loss in losses], theirs


@pytest.mark.parametrize("name", KNOWN_TO_TRANSFORMERS)
def test_packed_losses_and_gradients_are_those_of_transformers_on_single_sequences(name):
    model = build_model(name)
    losses, gradients = losses_and_gradients(model, batch_of(model, "packed"))
    expected_losses, theirs = transformers_losses(model)
    assert losses == pytest.approx(expected_losses, rel=RELATIVE_TOLERANCE)
    expected = {key: parameter.grad for key, parameter in theirs.named_parameters()}
    assert all(gradient is not None for gradient in expected.values())
    with torch.no_grad():  # gradients take the way of the weights, so that the names and transposes are those of export
        for key, parameter in model.named_parameters():
            parameter.copy_(gradients[key])
    found = huggingface_weights(model)
    for bias in [key for key in found if key.endswith("key.bias")]:
        # Adds the same to all scores of a query: its gradient is zero but for rounding.
        scale = expected[bias.replace("key", "query")].norm()
        assert max(found.pop(bias).norm(), expected.pop(bias).norm()) <= RELATIVE_TOLERANCE * scale
    assert_same_gradients(found, expected)


@pytest.mark.parametrize("isolate", [True, False])
@pytest.mark.parametrize("name", ["learned", "rotary", "alibi"])
def test_where_positions_restart_distinguishes_relative_ones_only_between_sequences(name, isolate):
    """ALiBi depends on the slots of a segment, so it cannot distinguish them either, not by a bit."""
    model = build_model(name)
    restarting, running = (batch_of(model, "packed", isolate=isolate, reset_positions=reset) for reset in (True, False))
    expected_losses, expected = losses_and_gradients(model, restarting)
    losses, gradients = losses_and_gradients(model, running)
    is_equal = name == "alibi" or (name == "rotary" and isolate)
    assert (losses == pytest.approx(expected_losses, rel=RELATIVE_TOLERANCE)) == is_equal
    if is_equal:
        assert_same_gradients(gradients, expected)
    if name == "alibi":
        assert losses == expected_losses
        assert all(torch.equal(gradients[name], gradient) for name, gradient in expected.items())


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_mixes_segments_would_miss_the_tolerance_by_far(name):
    """This is the control: isolation is off, everything else is the same."""
    model = build_model(name)
    apart, _ = losses_and_gradients(model, batch_of(model, "packed"))
    together, _ = losses_and_gradients(model, batch_of(model, "packed", isolate=False))
    for one, other in zip(together, apart, strict=True):
        assert one != pytest.approx(other, rel=100 * RELATIVE_TOLERANCE)
