"""What optimizer and sharding hold on a rank, by ZeRO stage and as formulas."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evenpack.engine.sharding.stages import BUCKET_SIZE
from evenpack.units import FP32_BYTES

_FP64_BYTES = 8

_REDUCE_BUCKET_SIZE = 500_000_000
"""Gradients that DeepSpeed reduces at once, as a number: the default of `zero_optimization.reduce_bucket_size`."""

_LIVE_PARAMETERS = 1_000_000_000
"""Parameters that a rank may hold gathered at once: the default of `zero_optimization.stage3_max_live_parameters`."""


@dataclass(frozen=True, kw_only=True)
class StateSizes:
    """The numbers from which the memory of a training state follows."""

    parameters: int
    largest_tensor: int
    """Elements of the largest parameter."""
    states: int
    """FP32 numbers that the optimizer holds for each parameter."""
    fewer_states: int = 0
    """What it holds fewer: Muon has one number for each weight of its matrices. At ZeRO 0 alone."""
    temporaries: int
    """FP32 numbers for each parameter that it holds during an update of the largest group."""
    largest_group: int
    """Elements of the parameters that are updated together, at the most."""
    ranks: int

    @property
    def part(self) -> int:
        """Parameters of a rank's part."""
        return -(-self.parameters // self.ranks)


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """What optimizer and sharding hold on one rank, in bytes."""

    parameters: int
    """FP32 parameters during a step."""
    gradients: int
    """Gradients of parameters, at most: of a rank's part where each backward pass reduces them."""
    optimizer: int
    """The optimizer's state, between steps."""
    bucket: int
    """Buffers from a step's first gradient until the gradients are reduced."""
    copies: int
    """Copies of gradients that are reduced during the rest of the backward pass through the blocks."""
    reduction: int
    """Further buffers of the reduction."""
    update_gradients: int
    """Gradients at the update."""
    update: int
    """Temporary numbers of the update."""


def state_bytes(stage: int, sizes: StateSizes, settings: Mapping[str, Any]) -> StateBytes:
    """Returns what parameters, gradients, the optimizer's state and DeepSpeed's buffers take on a GPU.

    At ZeRO 0 a bucket is copied among several ranks, which may have up to twice `BUCKET_SIZE`; one is counted.

    From ZeRO 1 on a rank has its part of FP32 masters, a second copy of the parameters, and of the states. DeepSpeed
    makes the bucket at the first gradient of a step, in full size, however small the model is, and moves the gradients
    into it when they are reduced; at ZeRO 1 the gradients of the rank's part then move to a separate buffer, and later
    stages keep no others. The norm is taken in FP64, tensor by tensor. At ZeRO 3 a rank keeps its part of the
    parameters, and the ones that are gathered: DeepSpeed releases a layer's only if more than
    `stage3_max_live_parameters` would be.

    Args:
        settings: DeepSpeed's configuration.
    """
    whole = FP32_BYTES * sizes.parameters
    if stage == 0:
        return StateBytes(
            parameters=whole,
            gradients=whole,
            optimizer=FP32_BYTES * (sizes.states * sizes.parameters - sizes.fewer_states),
            bucket=0,
            copies=FP32_BYTES * BUCKET_SIZE if sizes.ranks > 1 else 0,
            reduction=0,
            update_gradients=whole,
            update=FP32_BYTES * sizes.temporaries * sizes.largest_group,
        )
    zero = settings["zero_optimization"]
    bucket = zero.get("reduce_bucket_size", _REDUCE_BUCKET_SIZE)
    live = min(sizes.parameters, zero.get("stage3_max_live_parameters", _LIVE_PARAMETERS))
    part = FP32_BYTES * sizes.part
    return StateBytes(
        parameters=part + FP32_BYTES * live if stage == 3 else whole,
        gradients=whole if stage == 1 else part,
        optimizer=(1 + sizes.states) * part,
        bucket=FP32_BYTES * bucket * (2 if zero.get("overlap_comm", False) else 1),
        copies=0,
        reduction=max(0, part - FP32_BYTES * bucket) if stage == 1 else 0,
        update_gradients=part,
        update=max((1 + sizes.temporaries) * part, _FP64_BYTES * min(sizes.part, sizes.largest_tensor)),
    )
