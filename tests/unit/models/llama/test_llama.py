"""Llama: its section, its numbers, and that positions restart in each sequence."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from batches import build_batch, random_sequences
from masked_batches import build_masked_batch, random_pairs
from scored_tokens import next_token_logits
from torch import nn

from evenpack.config import validate
from evenpack.engine.optimizers.build import build_optimizer, parameter_groups
from evenpack.engine.optimizers.config import AdamWSection, LambSection
from evenpack.errors import ConfigError
from evenpack.models.build import Model, new_model
from evenpack.models.common.layers import MergedLinear
from evenpack.models.common.positions import Rotation
from evenpack.models.cost import parameter_count
from evenpack.models.llama.config import LlamaConfig
from evenpack.models.llama.model import Llama

VOCABULARY = 101
SMALL = {"preset": "tiny", "layers": 3, "hidden_size": 32, "heads": 4, "key_value_heads": 2, "feed_forward_size": 48}


def section(**changes: Any) -> LlamaConfig:
    return validate({"kind": "llama", **SMALL, **changes}, LlamaConfig, origin="model")


def small_llama(**changes: Any) -> Model:
    return new_model(section(**changes), vocabulary_size=VOCABULARY, max_positions=64, seed=3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key_value_heads": 3}, r"key_value_heads \(3\) must divide heads \(4\): one of 1, 2, 4"),
        ({"key_value_heads": 8}, r"key_value_heads \(8\) must divide heads \(4\)"),
        ({"heads": 3, "hidden_size": 30}, r"key_value_heads \(2\) must divide heads \(3\): one of 1, 3"),
        ({"heads": 32, "key_value_heads": 1}, r"hidden_size / heads must be even, found 1"),
        ({"hidden_size": 34}, "must be a multiple of heads"),
    ],
)
def test_a_section_that_describes_no_model_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        section(**changes)


@pytest.mark.parametrize(
    ("preset", "vocabulary_size", "parameters"),
    [
        ("8b", 128_256, 8_030_261_248),  # as the index of its safetensors has it
        ("1.1b", 32_000, 1_100_048_384),  # as TinyLlama's model card and its safetensors header have it
        ("160m", 32_000, 162_417_408),  # 49,152,000 of embedding and head, 113,265,408 of blocks and norms
    ],
)
def test_presets_have_the_published_number_of_parameters(preset: str, vocabulary_size: int, parameters: int) -> None:
    config = LlamaConfig(kind="llama", preset=preset)
    assert parameter_count(config, vocabulary_size=vocabulary_size, max_positions=2048) == parameters


def test_initial_weights_are_normal_and_gains_one() -> None:
    model = small_llama()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert (parameter == 1.0).all(), name
        else:
            shrunk = name.endswith(("attention.output.weight", "contract.weight"))
            expected = 0.02 / (6**0.5 if shrunk else 1.0)
            assert parameter.std().item() == pytest.approx(expected, rel=0.1), name
    assert not any(name.endswith("bias") for name, _ in model.named_parameters())


def test_a_model_that_says_no_initial_values_for_a_weight_is_refused() -> None:
    class WithScale(Llama):
        def _build(self, attention_backend: str) -> None:
            super()._build(attention_backend)
            self.scale = nn.Parameter(torch.empty(3))

    with pytest.raises(TypeError, match="WithScale defines no initial values for scale: override initialize"):
        WithScale(section(), vocabulary_size=VOCABULARY, max_positions=64)


def test_the_head_is_the_embedding_where_it_is_tied() -> None:
    batch, _ = build_batch([random_sequences([9, 4], vocabulary_size=VOCABULARY)], "packed", max_sequence_length=9)
    tied, untied = small_llama(tied_head=True), small_llama()
    assert "output_head.weight" not in tied.state_dict()
    assert "output_head.weight" in untied.state_dict()
    before = next_token_logits(untied, batch)
    with torch.no_grad():
        untied.output_head.weight.mul_(2.0)
    assert torch.equal(next_token_logits(untied, batch), 2.0 * before)


def test_positions_restart_in_each_sequence_and_count() -> None:
    sequences = random_sequences([9, 9], vocabulary_size=VOCABULARY)
    batch, spans = build_batch([[sequences[0], sequences[0]]], "packed", max_sequence_length=9)
    model = small_llama()
    logits = next_token_logits(model, batch)
    torch.testing.assert_close(logits[spans[0]], logits[spans[1]], rtol=1e-6, atol=1e-6)
    strewn = replace(batch, position_ids=torch.where(batch.position_ids == 3, 7, batch.position_ids))
    assert (next_token_logits(model, strewn) - logits).abs().max() > 1e-5


def test_rotation_sees_distances_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, 2, 16, generator=generator, dtype=torch.float64) for _ in range(2))

    def score(query_position: int, key_position: int) -> torch.Tensor:
        places = (torch.tensor([query_position]), torch.tensor([key_position]))
        turned = [
            Rotation.at(place, head_dim=16, base=100.0).turn(heads)
            for place, heads in zip(places, (query, key), strict=True)
        ]
        return (turned[0] * turned[1]).sum(2)

    torch.testing.assert_close(score(0, 0), (query * key).sum(2))
    torch.testing.assert_close(score(25, 20), score(5, 0), rtol=1e-4, atol=1e-4)
    assert (score(25, 20) - score(25, 21)).abs().max() > 0.1


def test_queries_keep_their_dtype_and_length_when_they_are_turned() -> None:
    heads = torch.randn(7, 2, 16, generator=torch.Generator().manual_seed(0))
    rotation = Rotation.at(torch.arange(7) * 100, head_dim=16, base=10_000.0)
    torch.testing.assert_close(rotation.turn(heads).norm(dim=2), heads.norm(dim=2))
    assert rotation.turn(heads.bfloat16()).dtype == torch.bfloat16


def test_masked_targets_are_refused() -> None:
    batch, _ = build_masked_batch(
        [random_pairs([9], vocabulary_size=VOCABULARY)], "packed", max_sequence_length=9, pack_length=9
    )
    with pytest.raises(
        ValueError, match="Llama learns from targets next_token, the batch has masked_token, next_sentence"
    ):
        small_llama()(batch)


def test_gains_do_not_decay_and_matrices_do() -> None:
    model = small_llama()
    names = {parameter: name for name, parameter in model.named_parameters()}
    decaying, others = parameter_groups(model, weight_decay=0.1)
    assert sorted(names[parameter] for parameter in others["params"]) == sorted(
        name for name in names.values() if "norm" in name
    )
    assert len(decaying["params"]) + len(others["params"]) == len(names)
    build_optimizer(model, AdamWSection(learning_rate=1e-3), torch.device("cpu"))


def test_lamb_takes_merged_layers_apart_at_their_own_sizes() -> None:
    """Query 32, key and value 16 rows each; gate and values of the feed-forward layer 48 each."""
    model = small_llama()
    names = {parameter: name for name, parameter in model.named_parameters()}
    optimizer = build_optimizer(model, LambSection(kind="lamb", learning_rate=0.1), torch.device("cpu"))
    merged = {group["parts"]: group["params"] for group in optimizer.param_groups if group["parts"]}
    assert {parts: {names[parameter].split(".", 2)[2] for parameter in params} for parts, params in merged.items()} == {
        (32, 16, 16): {"attention.query_key_value.weight"},
        (48, 48): {"feed_forward.expand.weight"},
    }
    grouped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert len(grouped) == len(set(grouped)) == len(names)


def test_a_merged_layer_computes_what_its_parts_would_alone() -> None:
    torch.manual_seed(0)
    merged = MergedLinear(6, (4, 2, 3))
    inputs = torch.randn(5, 6)
    first, second, third = merged.separately(inputs)
    assert [part.shape[1] for part in (first, second, third)] == [4, 2, 3]
    torch.testing.assert_close(second, inputs @ merged.weight[4:6].T + merged.bias[4:6])
