"""The estimate of memory agrees with autograd's use, and with the counted parameters."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from batches import build_batch, random_sequences
from masked_batches import build_masked_batch, random_pairs
from torch import nn

from evenpack.batch import PackedBatch
from evenpack.engine.memory.phases import TrainingMemory, estimate_training_memory
from evenpack.engine.memory.state import StateSizes, state_bytes
from evenpack.kernels.costs import loss_chunk_bytes
from evenpack.models.bert.config import BertConfig
from evenpack.models.build import Model, new_model
from evenpack.models.common import layers
from evenpack.models.config import ModelConfig
from evenpack.models.gpt2.config import Gpt2Config
from evenpack.models.llama.config import LlamaConfig

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


def kept_by_estimate(config: ModelConfig, batch: PackedBatch) -> int:
    """Returns what is alive at the loss, without its chunk of logits and the weights that autocast has cast."""
    loss = memory_of_batch(config, batch).phases[0]
    sizes = {"hidden_size": WIDTH, "vocabulary_size": VOCABULARY, "number_bytes": 2}
    return loss.activations + loss.head - loss_chunk_bytes(rows=batch.head_rows, **sizes)


def memory_of_batch(config: ModelConfig, batch: PackedBatch) -> TrainingMemory:
    sizes = {"vocabulary_size": VOCABULARY, "max_positions": SLOTS}
    state = StateSizes(parameters=0, largest_tensor=0, states=0, temporaries=0, largest_group=0, ranks=1)
    return estimate_training_memory(
        config,
        **sizes,
        slots=batch.slots,
        head_rows=batch.head_rows,
        number_bytes=2,
        accumulates=False,
        state=state_bytes(0, state, {}),
    )


def test_activations_are_those_that_autograd_keeps(
    config_and_batch: tuple[ModelConfig, PackedBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, batch = config_and_batch
    shapes = {count: config.model_copy(update={"layers": count}) for count in (2, 6)}
    estimated = {count: kept_by_estimate(shape, batch) for count, shape in shapes.items()}
    monkeypatch.setattr(
        layers, "packed_attention", lambda query, key, value, *_, **__: VarlenStandIn.apply(query, key, value)
    )
    measured = {}
    for count, shape in shapes.items():
        model = new_model(shape, vocabulary_size=VOCABULARY, max_positions=SLOTS)
        norms = sum(isinstance(layer, nn.RMSNorm) for layer in model.modules())
        of_this_cpu = norms * SLOTS * WIDTH * 4  # its RMSNorm is no one kernel, and keeps the normalised sums too
        measured[count] = kept_bytes(model, batch) - of_this_cpu
    held_for_a_moment = 4 * SLOTS * WIDTH * 4
    assert 0.99 * measured[6] <= estimated[6] <= measured[6] + held_for_a_moment
    of_blocks = estimated[6] - estimated[2]
    assert of_blocks == pytest.approx(measured[6] - measured[2], rel=0.02), "a block is what there are many of"


def test_dropout_keeps_two_flags_a_block_and_one_after_the_embedding(
    config_and_batch: tuple[ModelConfig, PackedBatch],
) -> None:
    config, batch = config_and_batch
    plain, dropout = (
        memory_of_batch(config.model_copy(update={"dropout": rate}), batch).phases[0].activations for rate in (0.0, 0.1)
    )
    assert dropout - plain == (2 * config.shape["layers"] + 1) * SLOTS * WIDTH


ZERO: dict[str, Any] = {"zero_optimization": {}}
STATES = StateSizes(parameters=1000, largest_tensor=600, states=2, temporaries=1, largest_group=700, ranks=4)


def test_a_replica_holds_the_whole_state() -> None:
    state = state_bytes(0, STATES, {})
    assert (state.optimizer, state.bucket, state.copies, state.reduction) == (8000, 0, 128 * 2**20, 0)
    assert state_bytes(0, replace(STATES, ranks=1), {}).copies == 0
    assert (state.update_gradients, state.update) == (4000, 2800)


def test_zero_1_holds_a_part_of_the_state_with_masters_and_a_bucket_of_full_size() -> None:
    state = state_bytes(1, STATES, {"zero_optimization": {}})
    assert (state.optimizer, state.bucket, state.reduction) == (3 * 1000, 4 * 500_000_000, 0)
    assert (state.update_gradients, state.update) == (1000, 2000)
    settings = {"zero_optimization": {"reduce_bucket_size": 100, "overlap_comm": True}}
    assert state_bytes(1, STATES, settings).bucket == 2 * 4 * 100


def test_zero_2_keeps_a_part_of_the_gradients_and_zero_3_of_the_parameters() -> None:
    replicated, first, second, third = (state_bytes(stage, STATES, ZERO) for stage in range(4))
    assert [state.gradients for state in (replicated, first, second, third)] == [4000, 4000, 1000, 1000]
    assert [state.parameters for state in (replicated, first, second, third)] == [4000, 4000, 4000, 5000]
    few = {"zero_optimization": {"stage3_max_live_parameters": 100}}
    assert state_bytes(3, STATES, few).parameters == 4 * (250 + 100)
    assert (second.optimizer, second.bucket) == (first.optimizer, first.bucket)


def of_state(*, slots: int, **changes: Any) -> TrainingMemory:
    config = BertConfig(kind="bert", preset="large", **changes)
    state = StateSizes(parameters=336_226_108, largest_tensor=0, states=2, temporaries=1, largest_group=0, ranks=1)
    return estimate_training_memory(
        config,
        vocabulary_size=30_522,
        max_positions=512,
        slots=slots,
        head_rows=slots // 6,
        number_bytes=2,
        accumulates=False,
        state=state_bytes(0, state, {}),
    )


def test_without_slots_the_peak_is_where_the_gradients_of_a_tied_matrix_meet() -> None:
    meeting = 336_226_108 * 4 * 4 + 2 * 4 * 30_522 * 1024
    assert of_state(slots=0).peak.total == pytest.approx(meeting, rel=1e-4)


def test_checkpointing_keeps_the_blocks_inputs_and_recomputes_one_block() -> None:
    plain, recomputed = (of_state(slots=1 << 16, activation_checkpointing=recomputes) for recomputes in (False, True))
    assert plain.peak.phase == "loss"
    assert recomputed.peak.phase == "last block"
    assert recomputed.phases[0].activations < plain.phases[0].activations / 5
    assert recomputed.peak.activations > recomputed.phases[0].activations + 0.8 * plain.phases[0].activations / 24


@pytest.mark.parametrize(("tokens", "chunks"), [(100, 1), (10_000, 2)])
def test_a_second_chunk_of_logits_is_computed_beside_the_first(tokens: int, chunks: int) -> None:
    found = loss_chunk_bytes(rows=tokens, hidden_size=8, vocabulary_size=40_000, number_bytes=4)
    assert found == chunks * 4 * (tokens // chunks) * 40_000
