"""The memory that a micro-batch of a run needs on a GPU, estimated from its settings before it starts.

The estimate holds for attention kernels that keep no scores. `phases.py` explains the phases of a step, and imports
torch, which this module does when it estimates.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from evenpack.engine.config import RunConfig
from evenpack.engine.deepspeed_config import deepspeed_config
from evenpack.engine.memory.state import StateSizes, state_bytes
from evenpack.engine.resolving.data_facts import AverageItem
from evenpack.models.cost import model_sizes
from evenpack.models.families import family_of
from evenpack.units import BF16_BYTES, FP32_BYTES

if TYPE_CHECKING:
    from evenpack.engine.memory.phases import TrainingMemory

FREE_SHARE = Fraction(1, 10)
"""Part of a device that is left for what the estimate lacks: the context, NCCL's buffers, fragmentation. An assumption:
it was not measured."""


@dataclass(frozen=True, kw_only=True)
class MicroBatchSize:
    """The sizes of a micro-batch on which its memory depends."""

    slots: int
    head_rows: int
    """Rows of logits: masked tokens, or all slots of a model that predicts the next tokens."""


def training_memory(config: RunConfig, size: MicroBatchSize, *, vocabulary_size: int, ranks: int) -> "TrainingMemory":
    """Estimates a micro-batch of this size. Raises: ConfigError if the ranks cannot divide a step."""
    from evenpack.engine.memory.phases import estimate_training_memory

    state = _state_sizes(config, vocabulary_size=vocabulary_size, ranks=ranks)
    settings = deepspeed_config(config, ranks)
    return estimate_training_memory(
        config.model,
        vocabulary_size=vocabulary_size,
        max_positions=config.max_positions,
        slots=size.slots,
        head_rows=size.head_rows,
        number_bytes=FP32_BYTES if config.training.precision == "fp32" else BF16_BYTES,
        accumulates=config.training.micro_batches(ranks) > 1,
        state=state_bytes(config.deepspeed.zero_stage, state, settings),
    )


def _state_sizes(config: RunConfig, *, vocabulary_size: int, ranks: int) -> StateSizes:
    from evenpack.engine.optimizers.muon import TOGETHER

    sizes = model_sizes(config.model, vocabulary_size=vocabulary_size, max_positions=config.max_positions)
    largest_group, fewer_states = max(sizes.parameters - sum(sizes.merged), *sizes.merged, 0), 0
    if config.optimizer.kind == "muon":
        alike = max(sizes.matrices, default=0)
        largest_group = min(alike, max(TOGETHER, alike // config.model.shape["layers"]))
        fewer_states = sum(sizes.matrices)
    return StateSizes(
        parameters=sizes.parameters,
        largest_tensor=vocabulary_size * config.model.shape["hidden_size"],
        states=config.optimizer.fp32_states,
        fewer_states=fewer_states,
        temporaries=config.optimizer.fp32_temporaries,
        largest_group=largest_group,
        ranks=ranks,
    )


def micro_batch_size(config: RunConfig, item: AverageItem) -> MicroBatchSize:
    """Returns the size of a micro-batch: exact in the packed layout, else the size with average items.

    Masked tokens are those of an average item, rounded up: a share of its slots, at least one and at most
    `max_predictions` of each of its sequences.
    """
    training = config.training
    slots_of_an_item = {
        "packed": Fraction(item.row_slots),
        "unpadded": item.tokens,
        "padded": item.sequences * config.data.recipe.max_sequence_length,
    }
    slots = math.ceil(training.items_per_micro_batch * slots_of_an_item[training.layout])
    if family_of(config.model).objective == "next_tokens":
        return MicroBatchSize(slots=slots, head_rows=slots)
    masking = config.mask_limits
    share = max(Fraction(masking.share) * item.row_slots, item.sequences)
    masked = math.ceil(min(share, masking.max_predictions * item.sequences))
    return MicroBatchSize(slots=slots, head_rows=training.items_per_micro_batch * masked)
