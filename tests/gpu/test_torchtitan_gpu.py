"""torchtitan's Llama on packs of its adapter learns what it learns from documents alone, with masks of flex attention.

Only a GPU has a backward pass of these masks. In torchtitan's environment: `scripts/test_torchtitan -m gpu`.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from host_trainers import PACK_LENGTH, alone, flat_gradients, own_loader, relative_error

import evenpack

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torchtitan's masks need a CUDA device"),
]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = 1e-5
"""Of sums in FP32 that two kernels add in other orders."""


def llama(attention: Any) -> Any:
    """Returns torchtitan's smallest Llama with the same random weights at each call, in FP32."""
    from torchtitan.models.llama3 import llama3_configs

    config = llama3_configs["debugmodel"](attn_backend="flex")
    for layer in config.layers:
        rope = replace(layer.attention.rope, max_seq_len=PACK_LENGTH)
        layer.attention = replace(layer.attention, inner_attention=attention, rope=rope)
    torch.manual_seed(0)
    model = config.build().to(DEVICE)
    model.init_states(buffer_device=DEVICE)
    return model


class Alone(torch.nn.Module):
    """One document in a row, as a model of transformers is called: SDPA is causal, and knows no masks."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, *, input_ids: torch.Tensor, use_cache: bool) -> Any:
        assert not use_cache
        positions = torch.arange(input_ids.shape[1], device=DEVICE)[None]
        logits = self.model(input_ids.to(DEVICE), positions=positions)
        return type("Output", (), {"logits": logits.cpu()})


def loss_and_gradients(model: Any, loader: evenpack.Loader, *, with_borders: bool) -> tuple[float, torch.Tensor]:
    """Returns those of the first step as torchtitan's Trainer computes them, or with a pack as one document."""
    from torchtitan.components.loss import cross_entropy_loss

    from evenpack.adapters.torchtitan import torchtitan_inputs

    model.zero_grad()
    total = 0.0
    for batch in loader.batches_of(0):
        inputs, labels = torchtitan_inputs(batch.to(DEVICE))
        positions = inputs["positions"]
        borders = positions if with_borders else torch.arange(PACK_LENGTH, device=DEVICE).expand_as(positions)
        masks = model.get_attention_masks(borders)
        logits = model(inputs["input"], positions=positions, attention_masks=masks)
        loss = cross_entropy_loss(logits, labels) / loader.plan(0).counts.targets
        loss.backward()
        total += loss.item()
    return total, flat_gradients(model)


def test_loss_and_gradients_are_those_of_documents_alone() -> None:
    pytest.importorskip("torchtitan", reason="torchtitan needs an environment of its own: scripts/test_torchtitan")
    from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention

    loader = own_loader(micro_batches=2)
    packed, plain = llama(FlexAttention.Config()), llama(ScaledDotProductAttention.Config())
    plain.load_state_dict(packed.state_dict())
    expected_loss, expected = alone(Alone(plain), loader, 0)

    loss, gradients = loss_and_gradients(packed, loader, with_borders=True)
    assert loss == pytest.approx(expected_loss, rel=TOLERANCE)
    assert relative_error(gradients, expected) < TOLERANCE
    _, gradients = loss_and_gradients(packed, loader, with_borders=False)
    assert relative_error(gradients, expected) > 100 * TOLERANCE  # so that the comparison would see it
