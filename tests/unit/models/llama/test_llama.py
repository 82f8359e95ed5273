"""Llama: its section, its head and its merged layers."""

from typing import Any

import pytest
import torch
from batches import build_batch, random_sequences
from scored_tokens import next_token_logits
from torch import nn

from evenpack.config import validate
from evenpack.errors import ConfigError
from evenpack.models.build import Model, new_model
from evenpack.models.common.layers import MergedLinear
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
        ({"heads": 32, "key_value_heads": 1}, r"hidden_size / heads must be even, found 1"),
        ({"hidden_size": 34}, "must be a multiple of heads"),
    ],
)
def test_a_section_that_describes_no_model_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        section(**changes)


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


def test_a_merged_layer_computes_what_its_parts_would_alone() -> None:
    torch.manual_seed(0)
    merged = MergedLinear(6, (4, 2, 3))
    inputs = torch.randn(5, 6)
    first, second, third = merged.separately(inputs)
    assert [part.shape[1] for part in (first, second, third)] == [4, 2, 3]
    torch.testing.assert_close(second, inputs @ merged.weight[4:6].T + merged.bias[4:6])
