"""The estimate of memory agrees with autograd's use, and with the counted parameters."""

from typing import Any

import pytest
import torch
from batches import build_batch, random_sequences
from masked_batches import build_masked_batch, random_pairs
from torch import nn

from evenpack.batch import PackedBatch
from evenpack.engine.optimizers.config import AdamWSection, LambSection
from evenpack.models.bert.config import BertConfig
from evenpack.models.build import Model, new_model
from evenpack.models.common import layers
from evenpack.models.config import ModelConfig
from evenpack.models.gpt2.config import Gpt2Config
from evenpack.models.llama.config import LlamaConfig
from evenpack.models.memory import estimate_training_memory

SLOTS, WIDTH, VOCABULARY = 200, 64, 97


class VarlenStandIn(torch.autograd.Function):
    """Keeps what a varlen kernel keeps: its three inputs and its result."""

    @staticmethod
    def forward(context: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        result = query + value
        context.save_for_backward(query, key, value, result)
        return result

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradient, gradient, gradient


def kept_bytes(model: Model, batch: PackedBatch) -> int:
    """Returns the bytes that a forward pass under bf16 autocast keeps, without weights and their copies."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    weight_sizes = {layer.weight.numel() for layer in model.modules() if isinstance(layer, nn.Linear)}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters and tensor.numel() not in weight_sizes:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16):
        model.train()(batch)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.fixture(params=["bert", "gpt2", "gpt2, rotary", "llama"])
def config_and_batch(request: pytest.FixtureRequest) -> tuple[ModelConfig, PackedBatch]:
    section = {"preset": "tiny", "layers": 6, "hidden_size": WIDTH, "heads": 2, "dropout": 0.0}
    if request.param == "bert":
        pairs = [random_pairs([SLOTS], vocabulary_size=VOCABULARY, seed=1)]
        batch = build_masked_batch(pairs, "packed", max_sequence_length=SLOTS, pack_length=SLOTS)[0]
        return BertConfig(kind="bert", **section), batch
    sequences = [random_sequences([SLOTS], vocabulary_size=VOCABULARY)]
    batch = build_batch(sequences, "packed", max_sequence_length=SLOTS, pack_length=SLOTS)[0]
    if request.param == "llama":
        return LlamaConfig(kind="llama", key_value_heads=1, feed_forward_size=176, **section), batch
    positions = "rotary" if request.param == "gpt2, rotary" else "learned"
    return Gpt2Config(kind="gpt2", positions=positions, **section), batch


def activations(config: ModelConfig, batch: PackedBatch) -> int:
    return estimate_training_memory(
        config,
        vocabulary_size=VOCABULARY,
        max_positions=SLOTS,
        slots=batch.slots,
        head_rows=batch.targets.labels.shape[0],
        optimizer_states=3,
    ).activations


def test_activations_are_those_that_autograd_keeps(
    config_and_batch: tuple[ModelConfig, PackedBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        layers, "packed_attention", lambda query, key, value, *_, **__: VarlenStandIn.apply(query, key, value)
    )
    config, batch = config_and_batch
    found = {}
    for count in (2, 6):
        shape = config.model_copy(update={"layers": count})
        model = new_model(shape, vocabulary_size=VOCABULARY, max_positions=SLOTS)
        norms = sum(isinstance(layer, nn.RMSNorm) for layer in model.modules())
        of_this_cpu = norms * SLOTS * WIDTH * 4  # its RMSNorm is no one kernel, and keeps the normalised sums too
        found[count] = kept_bytes(model, batch) - of_this_cpu, activations(shape, batch)
    assert found[6][1] == pytest.approx(found[6][0], rel=0.05)
    measured, estimated = (found[6][index] - found[2][index] for index in range(2))
    assert estimated == pytest.approx(measured, rel=0.01), "a block is what there are many of"


def test_dropout_and_checkpointing_count(config_and_batch: tuple[ModelConfig, PackedBatch]) -> None:
    config, batch = config_and_batch
    plain = activations(config, batch)
    dropout = activations(config.model_copy(update={"dropout": 0.1}), batch)
    assert dropout - plain == SLOTS * WIDTH * (2 * 6 + 1), "two flags a block and one after the embedding"
    assert activations(config.model_copy(update={"activation_checkpointing": True}), batch) < plain / 2


@pytest.mark.parametrize(("states", "numbers"), [(AdamWSection.fp32_states, 4), (LambSection.fp32_states, 5)])
def test_states_are_counted_in_fp32(states: int, numbers: int) -> None:
    config = BertConfig(kind="bert", preset="large")
    memory = estimate_training_memory(
        config, vocabulary_size=30_522, max_positions=512, slots=0, head_rows=0, optimizer_states=states
    )
    assert memory.activations == 0
    assert memory.total == 336_226_108 * (4 * numbers + 2)
