"""The layout of sequences changes neither the loss of a whole model nor the gradients (invariant 3)."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from batches import LAYOUTS, build_batch, random_sequences
from exchanged_weights import huggingface_weights
from transformers import AutoConfig, AutoModelForCausalLM

from evenpack.models.build import new_model
from evenpack.models.gpt2.config import Gpt2Config
from evenpack.models.huggingface import mapping_of
from evenpack.models.llama.config import LlamaConfig

VOCABULARY = 67
LONGEST = 40
LENGTHS = [[40], [25, 9, 2, 1], [13, 13, 11], [3, 30]]
CPU_BACKENDS = ("auto", "reference", "sdpa")
RELATIVE_TOLERANCE = 1e-5


SHAPE = {"preset": "tiny", "layers": 3, "hidden_size": 64, "heads": 4}
DECODERS = {
    "learned": Gpt2Config(kind="gpt2", positions="learned", **SHAPE),
    "alibi": Gpt2Config(kind="gpt2", positions="alibi", **SHAPE),
    "rotary": Gpt2Config(kind="gpt2", positions="rotary", **SHAPE),
    "llama": LlamaConfig(kind="llama", key_value_heads=2, feed_forward_size=96, **SHAPE),
    "llama, tied": LlamaConfig(kind="llama", key_value_heads=1, feed_forward_size=96, tied_head=True, **SHAPE),
}
KNOWN_TO_TRANSFORMERS = ("learned", "llama", "llama, tied")


def build_model(decoder="learned", backend="auto"):
    config = DECODERS[decoder]
    model = new_model(config, vocabulary_size=VOCABULARY, max_positions=LONGEST, attention_backend=backend, seed=2)
    with torch.no_grad():  # initial weights hardly attend: larger ones make every path count
        for parameter in model.parameters():
            parameter.mul_(3.0)
    return model


def packs():
    return [random_sequences(lengths, vocabulary_size=VOCABULARY, seed=sum(lengths)) for lengths in LENGTHS]


def loss_and_gradients(model, batch):
    model.zero_grad()
    sums = model(batch)
    sums["next_token"].loss_sum.backward()
    return sums["next_token"].loss_sum.item(), {
        name: parameter.grad.clone() for name, parameter in model.named_parameters()
    }


def assert_same_gradients(found, expected):
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.norm() > 0, name
        assert (found[name] - gradient).norm() <= RELATIVE_TOLERANCE * gradient.norm(), name


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("decoder", DECODERS)
def test_packed_unpadded_and_padded_give_the_same_loss_and_gradients(decoder, backend):
    model = build_model(decoder, backend)
    batches = {
        layout: build_batch(packs(), layout, max_sequence_length=LONGEST, pack_length=LONGEST)[0] for layout in LAYOUTS
    }
    assert {layout: batch.slots for layout, batch in batches.items()} == {
        "packed": 4 * LONGEST,
        "unpadded": sum(map(sum, LENGTHS)),
        "padded": sum(map(len, LENGTHS)) * LONGEST,
    }
    expected_loss, expected = loss_and_gradients(build_model(decoder, "reference"), batches["unpadded"])
    for batch in batches.values():
        loss, gradients = loss_and_gradients(model, batch)
        assert loss == pytest.approx(expected_loss, rel=RELATIVE_TOLERANCE)
        assert_same_gradients(gradients, expected)


def transformers_sums(model):
    """Returns loss and gradients of transformers' model with the same weights, one un-packed sequence after another."""
    values = mapping_of(model.config).config_values(model, 0)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values), attn_implementation="eager")
    theirs.load_state_dict(huggingface_weights(model), strict=False)
    theirs.tie_weights()
    total = torch.zeros(())
    for sequence in (sequence for pack in packs() for sequence in pack):
        tokens = torch.tensor([sequence])
        logits = theirs(tokens, use_cache=False).logits[0, :-1]
        total = total + F.cross_entropy(logits, tokens[0, 1:], reduction="sum")
    total.backward()
    return total.item(), theirs


@pytest.mark.parametrize("decoder", KNOWN_TO_TRANSFORMERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_what_transformers_gives_on_single_sequences(layout, decoder):
    model = build_model(decoder)
    batch, _ = build_batch(packs(), layout, max_sequence_length=LONGEST, pack_length=LONGEST)
    loss, gradients = loss_and_gradients(model, batch)
    expected_loss, theirs = transformers_sums(model)
    assert loss == pytest.approx(expected_loss, rel=RELATIVE_TOLERANCE)
    expected = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    assert all(gradient is not None for gradient in expected.values())
    with torch.no_grad():  # gradients take the way of the weights, so that the names and transposes are those of export
        for name, parameter in model.named_parameters():
            parameter.copy_(gradients[name])
    assert_same_gradients(huggingface_weights(model), expected)


def test_a_model_that_mixes_segments_would_miss_the_tolerance_by_far():
    """This is the control: isolation is off, everything else is the same."""
    model = build_model()
    batch, _ = build_batch(packs(), "packed", max_sequence_length=LONGEST, pack_length=LONGEST)
    rows = torch.arange(0, batch.slots + 1, LONGEST, dtype=torch.int32)
    expected, _ = loss_and_gradients(model, batch)
    found, _ = loss_and_gradients(model, replace(batch, cu_seqlens=rows))
    assert abs(found - expected) > 100 * RELATIVE_TOLERANCE * expected


def packs_with(*, isolate, reset_positions):
    """Returns the packed batch in the layout of the switches for study."""
    batch, _ = build_batch(packs(), "packed", max_sequence_length=LONGEST, pack_length=LONGEST)
    if not isolate:  # a pack is one segment
        batch = replace(batch, cu_seqlens=torch.arange(0, batch.slots + 1, LONGEST, dtype=torch.int32))
    if not reset_positions:
        batch = replace(batch, position_ids=torch.arange(batch.slots) % LONGEST)
    return batch


@pytest.mark.parametrize("isolate", [True, False])
@pytest.mark.parametrize("decoder", ["learned", "rotary", "alibi"])
def test_where_positions_restart_distinguishes_relative_ones_only_between_sequences(decoder, isolate):
    """ALiBi depends on the slots of a segment, so it cannot distinguish them either, not by a bit."""
    model = build_model(decoder)
    expected_loss, expected = loss_and_gradients(model, packs_with(isolate=isolate, reset_positions=True))
    loss, gradients = loss_and_gradients(model, packs_with(isolate=isolate, reset_positions=False))
    is_equal = decoder == "alibi" or (decoder == "rotary" and isolate)
    assert (loss == pytest.approx(expected_loss, rel=RELATIVE_TOLERANCE)) == is_equal
    if is_equal:
        assert_same_gradients(gradients, expected)
    if decoder == "alibi":
        assert loss == expected_loss
        assert all(torch.equal(gradients[name], gradient) for name, gradient in expected.items())


@pytest.mark.parametrize("decoder", ["learned", "rotary", "alibi"])
def test_contamination_shows_in_every_kind_of_position(decoder):
    model = build_model(decoder)
    apart, _ = loss_and_gradients(model, packs_with(isolate=True, reset_positions=True))
    together, _ = loss_and_gradients(model, packs_with(isolate=False, reset_positions=True))
    assert together != pytest.approx(apart, rel=1e-3)
