"""Estimates the memory of a GPU in a training step, phase by phase: the peak is the largest of them.

    loss              all activations, the gradients that the loss computes ahead, and a chunk of logits
    head              the same activations, and those gradients twice: as computed, and scaled by the loss's gradient
    last block        the gradient of the output matrix, and what the backward pass through a block holds
    first block       the same with the gradients of all later blocks, without their activations and cast weights
    embedding         all gradients; a matrix that is embedding and head has two gradients, and their sum
    reduction         the buffers of the all-reduce
    update            what the optimizer holds for its update

Later micro-batches of a step begin with the gradients of the first ones. Left out are the device's context, the
collectives' own buffers, and fragmentation.

What is alive in a phase is traced on the model itself (`models/trace.py`); what the optimizer and the sharding hold
beside it are formulas (`state.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from evenpack.engine.memory.state import StateBytes
from evenpack.kernels.costs import loss_chunk_bytes
from evenpack.models.common.section import TransformerConfig
from evenpack.models.cost import parameter_count
from evenpack.models.trace import AXES, LIVE, Factors, moments_of
from evenpack.units import FP32_BYTES

_Traced = Literal["loss", "head", "last block", "first block", "embedding"]
Phase = Literal[_Traced, "reduction", "update"]


@dataclass(frozen=True, kw_only=True)
class PhaseMemory:
    """The bytes of one GPU in one phase of a step, at the most."""

    phase: Phase
    parameters: int
    """FP32 parameters, with the bfloat16 copies that autocast has made of the blocks'."""
    gradients: int
    """Gradients of parameters, except the output matrix's while they are part of `head`."""
    optimizer: int
    activations: int
    """What blocks and norms keep, and the temporary numbers of a block's backward pass."""
    head: int
    """Logits, and the gradients of the output matrix and of what it reads."""
    buffers: int
    """Buffers of the reduction, and temporary numbers of the update."""

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.head + self.buffers


@dataclass(frozen=True, kw_only=True)
class TrainingMemory:
    """The memory of one GPU in each phase of a step, in order."""

    phases: tuple[PhaseMemory, ...]

    @property
    def peak(self) -> PhaseMemory:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: phase.total)


def estimate_training_memory(
    config: TransformerConfig,
    *,
    vocabulary_size: int,
    max_positions: int,
    slots: int,
    head_rows: int,
    number_bytes: int,
    accumulates: bool,
    state: StateBytes,
) -> TrainingMemory:
    """Estimates a step whose attention kernel keeps no scores.

    Args:
        slots: of a micro-batch.
        head_rows: of a micro-batch: its masked tokens, or all slots of a model that predicts the next ones.
        number_bytes: bytes of the type of matrix products: 2 for `bf16_autocast`, 4 for `fp32`.
        accumulates: whether a step has more than one micro-batch.
        state: what optimizer and sharding hold.
    """
    traced = moments_of(
        config,
        vocabulary_size=vocabulary_size,
        max_positions=max_positions,
        number_bytes=number_bytes,
        accumulates=accumulates,
    )
    chunk = loss_chunk_bytes(
        rows=head_rows,
        hidden_size=config.shape["hidden_size"],
        vocabulary_size=vocabulary_size,
        number_bytes=number_bytes,
    )
    gradients = FP32_BYTES * parameter_count(config, vocabulary_size=vocabulary_size, max_positions=max_positions)
    sizes = np.array([1, slots, head_rows, 0])  # what is held for each sequence is left out

    def phase(name: _Traced) -> PhaseMemory:
        alive: Factors = traced.alive.get(name, np.zeros((1, len(LIVE), len(AXES)), dtype=np.int64)) @ sizes
        if name == "loss":
            alive[traced.loss_moment, LIVE.index("head")] += chunk
        found = [_phase(name, dict(zip(LIVE, map(int, moment), strict=True)), state, accumulates) for moment in alive]
        return max(found, key=lambda one: one.total)

    return TrainingMemory(phases=(*map(phase, get_args(_Traced)), *_update(state, gradients)))


def _phase(name: Phase, alive: Mapping[str, int], state: StateBytes, accumulates: bool) -> PhaseMemory:
    """Returns a moment of a phase; buckets are there from the first gradient of a step."""
    has_bucket = accumulates or alive["arrived"] > 0 or name not in ("loss", "head")
    copies = min(state.copies, alive["arrived"]) if name == "first block" else 0
    return PhaseMemory(
        phase=name,
        parameters=state.parameters + alive["cast weights"],
        gradients=min(alive["gradients"], state.gradients),
        optimizer=state.optimizer,
        activations=alive["activations"],
        head=alive["head"],
        buffers=(state.bucket if has_bucket else 0) + copies,
    )


def _update(state: StateBytes, gradients: int) -> tuple[PhaseMemory, PhaseMemory]:
    """Returns the reduction of the gradients, and the update."""

    def phase(name: Phase, held: int, buffers: int) -> PhaseMemory:
        return PhaseMemory(
            phase=name,
            parameters=state.parameters,
            gradients=min(held, state.gradients),
            optimizer=state.optimizer,
            activations=0,
            head=0,
            buffers=buffers,
        )

    reduction = phase("reduction", gradients, state.bucket + state.reduction)
    return reduction, phase("update", state.update_gradients, state.update)
