"""ZeRO 1, 2 and 3: the optimizer's state, the gradients and the parameters are divided among the ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from evenpack.engine.sharding.base import (
    REDUCE_BUCKET_SIZE,
    GradientReduction,
    SavedBytes,
    Sharding,
    StateBytes,
    StateSizes,
)
from evenpack.units import FP32_BYTES

if TYPE_CHECKING:
    from torch import Tensor, nn

    from evenpack.engine.world.distributed import World
    from evenpack.models.build import Model
    from evenpack.models.common.tensors import NamedWeights

_FP64_BYTES = 8

_LIVE_PARAMETERS = 1_000_000_000
"""Parameters that a rank may hold gathered at once: the default of `zero_optimization.stage3_max_live_parameters`."""


@dataclass(frozen=True)
class _AfterBackward(GradientReduction):
    """DeepSpeed reduces when the backward pass is over; its own overlap doubles the bucket and waits for the device."""

    deepspeed: Any
    model: "nn.Module"

    def finish(self) -> "Tensor | None":
        from evenpack.engine.optimizers.norms import gradient_norm_of

        norm = gradient_norm_of(self.model)
        self.deepspeed.allreduce_gradients()
        return norm


class _WithinBackward(GradientReduction):
    """DeepSpeed reduces in each backward pass."""

    def finish(self) -> "Tensor | None":
        return None


class PartitionedOptimizer(Sharding):
    """ZeRO 1: every rank holds a part of the optimizer's state, flattened over tensors; weights are whole."""

    stage = 1
    balances_each_micro_batch = False
    gathers_parameters = False
    updates_whole_tensors = False
    clips = "DeepSpeed"

    def reduction_traffic(
        self, *, tensors: int, ranks: int, parameters: int, tables: Sequence[int]
    ) -> tuple[int, float]:
        norm = 12 + 8  # each gradient is cast to FP64
        of_a_part = norm + 8 + 8  # clipped, and copied into the weights' buffer, by the rank that updates it
        whole = 4 + 8 + 8 + 8 + 8  # own norm; into the buffer, scaled, joined; weights copied back
        return 4 * tensors + 60, whole + of_a_part / ranks

    def deepspeed_settings(self, gradient_clipping: float | None) -> dict[str, Any]:
        return {"gradient_clipping": gradient_clipping or 0.0, "zero_optimization": {"stage": self.stage}}

    def reduction(self, deepspeed: Any, model: "nn.Module", world: "World") -> GradientReduction:
        return _AfterBackward(deepspeed, model)

    def clip(self, model: "nn.Module", limit: float | None) -> "Tensor | None":
        return None  # DeepSpeed takes the norm and clips in its step

    def leave_out_unless_finite(self, model: "nn.Module", norm: "Tensor | None") -> None:
        """Does nothing: DeepSpeed checks the norm in its step, and leaves the update out."""

    def norm_of_update(self, deepspeed: Any) -> "Tensor | float":
        norm: Tensor | float = deepspeed.get_global_grad_norm()
        return norm

    def state_bytes(self, sizes: StateSizes, settings: Mapping[str, Any]) -> StateBytes:
        """A rank has its part of FP32 masters, a second copy of the parameters, and of the states.

        DeepSpeed makes the bucket at the first gradient of a step, in full size, however small the model is, and moves
        the gradients into it when they are reduced; the gradients of the rank's part then move to a separate buffer.
        The norm is taken in FP64, tensor by tensor.
        """
        zero = settings["zero_optimization"]
        size = zero.get("reduce_bucket_size", REDUCE_BUCKET_SIZE)
        part = _part(sizes)
        whole = FP32_BYTES * sizes.parameters
        return StateBytes(
            parameters=whole,
            gradients=whole,
            optimizer=(1 + sizes.states) * FP32_BYTES * part,
            bucket=FP32_BYTES * size * (2 if zero.get("overlap_comm", False) else 1),
            copies=0,
            reduction=FP32_BYTES * max(0, part - size),
            update_gradients=FP32_BYTES * part,
            update=max(FP32_BYTES * (1 + sizes.temporaries) * part, _FP64_BYTES * min(part, sizes.largest_tensor)),
        )

    def saved_bytes(self, sizes: StateSizes) -> SavedBytes:
        """Every rank writes its part of the masters and states, and rank 0 the parameters as well."""
        part = FP32_BYTES * (1 + sizes.states) * _part(sizes)
        return SavedBytes(first_rank=part + FP32_BYTES * sizes.parameters, other_rank=part)


class PartitionedGradients(PartitionedOptimizer):
    """ZeRO 2: a rank keeps its part of the gradients alone; each backward pass reduces them as they come."""

    stage = 2
    balances_each_micro_batch = True

    def reduction_traffic(
        self, *, tensors: int, ranks: int, parameters: int, tables: Sequence[int]
    ) -> tuple[int, float]:
        """Read from `ZeroOptimizer_stage_1_and_2` of DeepSpeed 0.19; not traced.

        That of ZeRO 1 without the rank's own norm, and without joining gradients that are reduced one by one.
        """
        norm = 12 + 8
        of_a_part = norm + 8 + 8 + 8  # clipped, copied out of the bucket and into the weights' buffer
        whole = 8 + 8 + 8  # into the bucket, scaled; weights copied back
        return 4 * tensors + 60, whole + of_a_part / ranks

    def reduction(self, deepspeed: Any, model: "nn.Module", world: "World") -> GradientReduction:
        return _WithinBackward()

    def state_bytes(self, sizes: StateSizes, settings: Mapping[str, Any]) -> StateBytes:
        """Estimates as at ZeRO 1, but a rank keeps its part of the gradients; the bucket holds those being reduced."""
        part = FP32_BYTES * _part(sizes)
        return replace(super().state_bytes(sizes, settings), gradients=part, reduction=0)


class PartitionedParameters(PartitionedGradients):
    """ZeRO 3: a rank keeps its part of each parameter, and gathers a layer's parameters while it computes with them."""

    stage = 3
    gathers_parameters = True

    def place(self, model: "Model", seed: int, world: "World", settings: dict[str, Any]) -> None:
        """Divides each layer as soon as it has its weights, so that no rank ever holds more than one as a whole."""
        import torch

        from evenpack.engine.world.distributed import quiet_deepspeed

        zero: Any = quiet_deepspeed().zero
        divided: list[Any] = []

        def divide(layer: "nn.Module") -> None:
            parameters = list(layer.parameters(recurse=False))
            if divided:  # as DeepSpeed converts further parameters: reading its configuration again takes longer
                divided[0].convert_to_zero_parameters(param_list=parameters)
            else:
                zero.Init(module=layer, config_dict_or_path=settings, dtype=torch.float32)
            divided.extend(parameters)

        model.initialize(seed, before=lambda layer: _make_room(layer, world), after=divide)

    def fill(self, model: "Model", weights: "NamedWeights | None", world: "World") -> None:
        """Gathers one parameter after the other; rank 0 fills it, and each rank keeps its part."""
        from evenpack.engine.world.distributed import quiet_deepspeed
        from evenpack.models.common.tensors import fill_parameter

        zero: Any = quiet_deepspeed().zero
        names = {} if weights is None else {name.ours: name for name in weights.names}
        for name, parameter in model.named_parameters():
            with zero.GatheredParameters([parameter], modifier_rank=0):
                if weights is not None:
                    fill_parameter(parameter, names[name], weights.tensors)

    def reduction_traffic(
        self, *, tensors: int, ranks: int, parameters: int, tables: Sequence[int]
    ) -> tuple[int, float]:
        """Read from `DeepSpeedZeroOptimizer_Stage3` of DeepSpeed 0.19; not traced.

        That of ZeRO 2, but no weights are copied back: each layer copies what it gathers, forward and backward.
        """
        kernels, moved = super().reduction_traffic(tensors=tensors, ranks=ranks, parameters=parameters, tables=tables)
        return kernels + 2 * tensors, moved - 8 + 2 * 8

    def state_bytes(self, sizes: StateSizes, settings: Mapping[str, Any]) -> StateBytes:
        """Estimates as at ZeRO 2; of the parameters a rank keeps its part, and the ones that are gathered.

        DeepSpeed releases a layer's parameters only if more than `stage3_max_live_parameters` would be gathered.
        """
        zero = settings["zero_optimization"]
        live = min(sizes.parameters, zero.get("stage3_max_live_parameters", _LIVE_PARAMETERS))
        return replace(super().state_bytes(sizes, settings), parameters=FP32_BYTES * (_part(sizes) + live))

    def saved_bytes(self, sizes: StateSizes) -> SavedBytes:
        """Every rank writes its part of the masters and states, and DeepSpeed no other parameters."""
        part = FP32_BYTES * (1 + sizes.states) * _part(sizes)
        return SavedBytes(first_rank=part, other_rank=part)


def _make_room(layer: "nn.Module", world: "World") -> None:
    layer.to_empty(device=world.device, recurse=False)


def _part(sizes: StateSizes) -> int:
    """Returns the parameters of a rank's part."""
    return -(-sizes.parameters // sizes.ranks)
