"""What the models of all families have in common: initial weights, dropout, and recomputed activations."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import build_batch, random_sequences
from masked_batches import build_masked_batch, random_pairs
from torch import Tensor

from evenpack.batch import PackedBatch
from evenpack.errors import BackendError
from evenpack.models.build import Model, new_model
from evenpack.models.common.layers import SelfAttention
from evenpack.models.families import config_of, find_family, known_families
from evenpack.models.huggingface import to_huggingface

VOCABULARY, LONGEST = 64, 24
ALIBI = {"positions": "alibi"}
EXPORTED = {
    "gpt2": "attn_pdrop",
    "llama": "attention_dropout",
    "modernbert": "attention_dropout",
    "bert": "attention_probs_dropout_prob",
}
"""Transformers' names of the rate, for each family that is exported."""


def model_of(kind: str, *, seed: int = 0, backend: str = "auto", **settings: Any) -> Model:
    values = {"kind": kind, "layers": 2, "hidden_size": 32, "heads": 2, "dropout": 0.0, **settings}
    if kind == "llama":
        values = {"key_value_heads": 1, "feed_forward_size": 48} | values
    config = config_of(kind).model_validate(values)
    return new_model(config, vocabulary_size=VOCABULARY, max_positions=LONGEST, attention_backend=backend, seed=seed)


def batch_of(kind: str) -> PackedBatch:
    if find_family(kind).objective == "masked_tokens":
        pairs = [random_pairs([10, 14], vocabulary_size=VOCABULARY)]
        return build_masked_batch(pairs, "packed", max_sequence_length=LONGEST, pack_length=LONGEST)[0]
    sequences = [random_sequences([10, 14], vocabulary_size=VOCABULARY)]
    return build_batch(sequences, "packed", max_sequence_length=LONGEST, pack_length=LONGEST)[0]


def loss_and_gradients(model: Model, batch: PackedBatch, *, seed: int) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(seed)
    model.zero_grad()
    loss = sum((output.loss_sum for output in model(batch).values()), torch.zeros(()))
    loss.backward()
    return loss.detach(), {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


@pytest.mark.parametrize("kind", known_families())
def test_initial_weights_depend_on_the_seed_alone(kind: str) -> None:
    weights, before = model_of(kind, seed=5).state_dict(), torch.get_rng_state()
    again, other = model_of(kind, seed=5).state_dict(), model_of(kind, seed=6).state_dict()
    assert torch.equal(torch.get_rng_state(), before), "torch's own random state is left alone"
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert not torch.equal(weights["token_embedding.weight"], other["token_embedding.weight"])


ON_THE_RESIDUAL_STREAM = ("attention.output.weight", "feed_forward.contract.weight")


@pytest.mark.parametrize(
    ("kind", "shrunk", "cut"),
    [
        ("gpt2", ON_THE_RESIDUAL_STREAM, None),
        ("llama", ON_THE_RESIDUAL_STREAM, None),
        ("bert", (), None),
        ("modernbert", (*ON_THE_RESIDUAL_STREAM, "masked_token_head.dense.weight"), 2.0),
    ],
)
def test_initial_weights_are_those_of_the_published_recipe(
    kind: str, shrunk: tuple[str, ...], cut: float | None
) -> None:
    """Normals of 0.02, on the residual stream divided by the root of twice the layers, in ModernBERT cut at two."""
    for name, parameter in model_of(kind, layers=8, hidden_size=128, heads=4).named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert (parameter == 1.0).all(), name
        else:
            deviation = 0.02 / (16**0.5 if name.endswith(shrunk) else 1.0)
            left = 0.8796 if cut else 1.0  # of a normal distribution's deviation, cut at two of them
            share = 5.0 / math.sqrt(2.0 * parameter.numel())  # five times the standard error of a deviation
            assert parameter.std().item() == pytest.approx(left * deviation, rel=share), name
            assert abs(parameter.mean().item()) < 6 * deviation / parameter.numel() ** 0.5, name
            assert (parameter.abs().max() <= 2 * deviation) == bool(cut), name


@pytest.mark.parametrize("kind", known_families())
def test_a_model_built_on_the_meta_device_becomes_the_same_model(kind: str) -> None:
    with torch.device("meta"):
        model = model_of(kind)
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(7.0)
    model.initialize(0)
    expected = model_of(kind, seed=0).state_dict()
    assert model.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("kind", known_families())
def test_a_backend_that_cannot_serve_here_is_an_error(kind: str) -> None:
    with pytest.raises(BackendError, match="varlen"):
        model_of(kind, backend="varlen")(batch_of(kind))


@pytest.mark.parametrize("kind", known_families())
def test_dropout_repeats_under_a_seed_and_is_off_in_evaluation(kind: str) -> None:
    model, batch = model_of(kind, dropout=0.2), batch_of(kind)
    first, again, other = (loss_and_gradients(model, batch, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first[0], again[0])
    assert all(torch.equal(gradient, again[1][name]) for name, gradient in first[1].items())
    assert not torch.equal(first[0], other[0])
    model.eval()
    evaluated, repeated = (loss_and_gradients(model, batch, seed=seed)[0] for seed in (1, 2))
    assert torch.equal(evaluated, repeated)
    torch.testing.assert_close(evaluated, loss_and_gradients(model_of(kind), batch, seed=1)[0], rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("kind", known_families())
def test_dropout_of_the_embedding_drops_all_that_goes_into_the_blocks(kind: str) -> None:
    model = model_of(kind)
    model.embedding_dropout.p = 1.0
    assert not model.hidden_states(batch_of(kind)).any()  # initial biases are zero, so that nothing comes from nothing


@pytest.mark.parametrize("dropout", [{}, {"dropout": 0.2}, {"attention_dropout": 0.4}], ids=str)
@pytest.mark.parametrize(("kind", "settings"), [*((kind, {}) for kind in known_families()), ("gpt2", ALIBI)])
def test_activation_checkpointing_recomputes_and_gives_the_same_gradients(
    kind: str, settings: dict[str, Any], dropout: dict[str, float]
) -> None:
    results, calls, batch = [], [], batch_of(kind)
    for checkpointing in (False, True):
        model = model_of(kind, activation_checkpointing=checkpointing, **settings, **dropout)
        calls.append(0)

        def count(*_: Any) -> None:
            calls[-1] += 1

        for block in model.blocks:
            block.feed_forward.expand.register_forward_pre_hook(count)
        results.append(loss_and_gradients(model, batch, seed=3))
    assert calls == [2, 4]
    assert torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(gradient, results[1][1][name]) for name, gradient in results[0][1].items())
    is_drawn = not torch.equal(results[0][0], loss_and_gradients(model, batch, seed=4)[0])
    assert is_drawn == bool(dropout), "something is dropped"


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


@pytest.mark.parametrize("kind", [kind for kind in known_families() if find_family(kind).huggingface is not None])
def test_transformers_is_told_both_rates(kind: str, tmp_path: Path) -> None:
    model = model_of(kind, dropout=0.2, attention_dropout=0.0)
    to_huggingface(model, tmp_path, tokenizer_dir=None, special_token_id=0)
    values = json.loads((tmp_path / "config.json").read_text())
    assert values[EXPORTED[kind]] == 0.0
    others = {value for key, value in values.items() if key in ("embd_pdrop", "resid_pdrop", "hidden_dropout_prob")}
    assert others <= {0.2}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", known_families())
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # of a CPU's RMSNorm
def test_a_residual_stream_of_16_bits_stays_so_forward_and_backward(kind: str, checkpointing: bool) -> None:
    """Losses and gradients are those of an FP32 stream but for rounding; parameters' gradients are FP32."""
    batch, results, dtypes = batch_of(kind), [], []
    for dtype in (None, torch.bfloat16):
        model = model_of(kind, activation_checkpointing=checkpointing)
        model.residual_dtype = dtype
        dtypes.append(found := [])
        for block in model.blocks:
            block.register_forward_hook(lambda _, given, out, found=found: found.append((given[0].dtype, out.dtype)))
            block.register_full_backward_hook(
                lambda _, into, out, found=found: found.append((into[0].dtype, out[0].dtype))
            )
        with torch.autocast("cpu", torch.bfloat16):
            results.append(loss_and_gradients(model, batch, seed=1))
    assert [set(found) for found in dtypes] == [{(torch.float32,) * 2}, {(torch.bfloat16,) * 2}]
    (loss, gradients), (rounded, others) = results
    assert rounded == pytest.approx(loss.item(), rel=2e-3)
    assert {gradient.dtype for gradient in others.values()} == {torch.float32}
    whole, other = (torch.cat([one[name].flatten() for name in gradients]) for one in (gradients, others))
    assert 0 < (other - whole).norm() < 0.02 * whole.norm()


def test_a_block_that_returns_another_type_than_the_residual_stream_has_is_refused() -> None:
    model = model_of("gpt2")
    model.residual_dtype = torch.bfloat16
    model.blocks[0].register_forward_hook(lambda _, given, out: out.float())
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(TypeError, match=r"PreNormBlock .* returned torch\.float32.*residual_dtype=fp32"),
    ):
        model(batch_of("gpt2"))
