"""ZeRO 1, 2 and 3: the optimizer's state, the gradients and the parameters are divided among the ranks."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evenpack.engine.sharding.base import GradientReduction, Sharding

if TYPE_CHECKING:
    from torch import Tensor, nn

    from evenpack.engine.world.distributed import World
    from evenpack.models.build import Model
    from evenpack.models.common.tensors import NamedWeights


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

    def deepspeed_settings(self, gradient_clipping: float | None) -> dict[str, Any]:
        return {"gradient_clipping": gradient_clipping or 0.0, "zero_optimization": {"stage": self.stage}}

    def reduction(self, deepspeed: Any, model: "nn.Module", world: "World") -> GradientReduction:
        return _AfterBackward(deepspeed, model)

    def update(
        self, deepspeed: Any, limit: float | None, *, norm: "Tensor | None", leaves_out: bool
    ) -> "Tensor | float":
        deepspeed.step()  # takes the norm and clips
        found: Tensor | float = deepspeed.get_global_grad_norm()
        return found


class PartitionedGradients(PartitionedOptimizer):
    """ZeRO 2: a rank keeps its part of the gradients alone; each backward pass reduces them as they come."""

    stage = 2
    balances_each_micro_batch = True

    def reduction(self, deepspeed: Any, model: "nn.Module", world: "World") -> GradientReduction:
        return _WithinBackward()


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


def _make_room(layer: "nn.Module", world: "World") -> None:
    layer.to_empty(device=world.device, recurse=False)
