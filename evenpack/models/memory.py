"""Estimates the memory of a GPU in a training step, phase by phase: the peak is the largest of them.

    loss              all activations, the gradients that the loss computes ahead, and a chunk of logits
    head              the same activations, and those gradients twice: as computed, and scaled by the loss's gradient
    last block        the gradient of the output matrix, and what the backward pass through a block holds
    first block       the same with the gradients of all later blocks, without their activations and cast weights
    embedding         all gradients; those of a matrix that is embedding and head are two, and their sum
    reduction         the buffers of the all-reduce
    update            what the optimizer holds for its update

Later micro-batches of a step begin with the gradients of the first ones. Left out are the device's context, the
collectives' own buffers, and fragmentation.

Shapes: P = parameters, T = slots, R = rows that go through the output head, C = hidden size, V = vocabulary.
"""

from dataclasses import dataclass
from typing import Literal

from evenpack.kernels.cross_entropy_bytes import LossBytes, loss_bytes
from evenpack.models.common.memory import BF16_BYTES, FP32_BYTES, LayerBytes, StateBytes
from evenpack.models.common.section import TransformerConfig
from evenpack.models.cost import parameter_count
from evenpack.models.families import family_of

Phase = Literal["loss", "head", "last block", "first block", "embedding", "reduction", "update"]


@dataclass(frozen=True, kw_only=True)
class PhaseMemory:
    """The bytes of one GPU in one phase of a step, at the most."""

    phase: Phase
    parameters: int
    """FP32 parameters, with the bfloat16 copies that autocast has made of the blocks'."""
    gradients: int
    """Gradients of parameters, apart from those of the output matrix on their way."""
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


@dataclass(frozen=True, kw_only=True)
class _Step:
    """The sizes of a step from which each phase is computed."""

    config: TransformerConfig
    layers: LayerBytes
    loss: LossBytes
    state: StateBytes
    parameters: int
    output_matrix: int
    """Elements of the output matrix."""
    stream: int
    """Bytes of the residual stream."""
    is_cast: bool
    accumulates: bool

    @property
    def recomputes(self) -> bool:
        return self.config.activation_checkpointing

    @property
    def kept(self) -> int:
        """Bytes that embedding and blocks keep."""
        block = self.layers.block_input if self.recomputes else self.layers.block
        return self.layers.embedding + self.config.shape["layers"] * block

    def weights(self, *, cast_blocks: int) -> int:
        """Returns the bytes of the parameters and of the cast ones of so many blocks."""
        cast = BF16_BYTES * cast_blocks * self.layers.cast_parameters if self.is_cast else 0
        return self.state.parameters + cast

    def phase(
        self, name: Phase, *, cast_blocks: int = 0, gradients: int, activations: int = 0, head: int = 0, buffers: int
    ) -> PhaseMemory:
        return PhaseMemory(
            phase=name,
            parameters=self.weights(cast_blocks=cast_blocks),
            gradients=min(gradients, self.state.gradients),
            optimizer=self.state.optimizer,
            activations=activations,
            head=head,
            buffers=buffers,
        )


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
        slots: T of a micro-batch.
        head_rows: R of a micro-batch: its masked tokens, or all slots of a model that predicts the next ones.
        number_bytes: bytes of the type of matrix products: 2 for `bf16_autocast`, 4 for `fp32`.
        accumulates: whether a step has more than one micro-batch.
        state: what optimizer and sharding hold.
    """
    width = config.shape["hidden_size"]
    step = _Step(
        config=config,
        layers=family_of(config).cost.layer_bytes(config, slots=slots, head_rows=head_rows, number_bytes=number_bytes),
        loss=loss_bytes(
            tokens=head_rows, hidden_size=width, vocabulary_size=vocabulary_size, number_bytes=number_bytes
        ),
        state=state,
        parameters=parameter_count(config, vocabulary_size=vocabulary_size, max_positions=max_positions),
        output_matrix=vocabulary_size * width,
        stream=FP32_BYTES * slots * width,
        is_cast=number_bytes == BF16_BYTES,
        accumulates=accumulates,
    )
    return TrainingMemory(phases=(*_forward(step), *_blocks(step), _embedding(step), *_update(step)))


def _forward(step: _Step) -> tuple[PhaseMemory, PhaseMemory]:
    """Returns the loss, and the backward pass through the head."""
    blocks = step.config.shape["layers"]
    before = FP32_BYTES * step.parameters if step.accumulates else 0
    bucket = step.state.bucket if step.accumulates else 0
    activations = step.kept + step.layers.head
    loss = step.phase(
        "loss",
        cast_blocks=blocks,
        gradients=before,
        activations=activations + step.layers.head_forward,
        head=step.loss.gradients + step.loss.chunk,
        buffers=bucket,
    )
    head = step.phase(
        "head",
        cast_blocks=0 if step.recomputes else blocks,
        gradients=before,
        activations=activations + step.layers.head_backward,
        head=2 * step.loss.gradients,
        # The gradients of the next-sentence head come first.
        buffers=step.state.bucket if step.config.predicts_next_sentence else bucket,
    )
    return loss, head


def _blocks(step: _Step) -> tuple[PhaseMemory, PhaseMemory]:
    """Returns the backward passes through the last block and through the first."""
    layers, blocks = step.layers, step.config.shape["layers"]
    outside = step.parameters - blocks * layers.block_parameters - step.output_matrix
    if not layers.tied_head:
        outside -= step.output_matrix  # the embedding, whose gradient comes at the end
    own = layers.block_backward
    if step.recomputes:
        own = layers.recomputed + max(layers.block_backward, layers.recomputing)
    last = step.phase(
        "last block",
        cast_blocks=1 if step.recomputes else blocks,
        gradients=FP32_BYTES * (step.parameters if step.accumulates else outside),
        activations=step.kept + own,
        head=_matrix_gradient(step),
        buffers=step.state.bucket,
    )
    later = outside + (blocks - 1) * layers.block_parameters
    one = layers.block_input if step.recomputes else layers.block
    first = step.phase(
        "first block",
        cast_blocks=1,
        gradients=FP32_BYTES * (step.parameters if step.accumulates else later),
        activations=layers.embedding + one + own,
        head=_matrix_gradient(step),
        buffers=step.state.bucket + min(step.state.copies, FP32_BYTES * later),
    )
    return last, first


def _matrix_gradient(step: _Step) -> int:
    """Returns the bytes of the output matrix's gradient during the backward pass through the blocks.

    It waits for the embedding's, if they are one matrix; else it is added to that of earlier micro-batches.
    """
    is_added = step.accumulates and not step.layers.tied_head
    return 0 if is_added else FP32_BYTES * step.output_matrix


def _embedding(step: _Step) -> PhaseMemory:
    """Returns the end of the backward pass: the head's gradient, the embedding's, and their sum if they are tied."""
    matrix = FP32_BYTES * step.output_matrix
    others = FP32_BYTES * step.parameters - (0 if step.accumulates else matrix)
    return step.phase(
        "embedding",
        gradients=others,
        activations=0 if step.layers.tied_head else step.stream,
        head=3 * matrix if step.layers.tied_head else matrix,
        buffers=step.state.bucket,
    )


def _update(step: _Step) -> tuple[PhaseMemory, PhaseMemory]:
    """Returns the reduction of the gradients, and the update."""
    state = step.state
    reduction = step.phase("reduction", gradients=FP32_BYTES * step.parameters, buffers=state.bucket + state.reduction)
    return reduction, step.phase("update", gradients=state.update_gradients, buffers=state.update)
